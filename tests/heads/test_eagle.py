"""EAGLE-3 heads behind the engine: logits of the formulas, and the distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from engine.cpu.decoder import CpuDecoder
from engine.drafting import chains, eagle, reading
from engine.heads.head import Head
from engine.plan import Emission, Row
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as Running
from engine.start.loading import LoadedModel
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders, oracles
from tests.heads.recording import SPECULATIONS, VOCABULARY, Recorder, largest_error, served
from tests.wrong import instead, level_by_level

HEADS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "eagle": {"layout": "eagle"},
    "norm before residual": {"layout": "eagle", "norm_before_residual": True},
    "residual before norm": {"norm_before_residual": False},
    "norm before fc": {"layout": "eagle", "eagle_config": {"norm_before_fc": True}, "norm_before_fc": True},
    "fc norm, norm of output": {"fc_norm": True, "norm_output": True},
    "all tokens": {"layout": "eagle", "draft_vocabulary": VOCABULARY},
    "shares embeddings": {"layout": "eagle", "width": folders.TARGET_WIDTH, "shares": ("embed_tokens",)},
    "shares both": {
        "width": folders.TARGET_WIDTH,
        "shares": ("embed_tokens", "lm_head"),
        "draft_vocabulary": VOCABULARY,
    },
    "qwen3 layers": {"layer_type": "qwen3"},
    "biases": {"attention_bias": True},
    "two layers": {"layers": 2},
    "scaled": {"layout": "eagle", "logit_scale": 0.5},
    "pickled": {"layout": "eagle", "binary": True},
}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return folders.target(VOCABULARY)


def errors(
    target: LoadedModel, written: folders.Written, recorder: Recorder, texts: list[list[int]], most: int = 40
) -> float:
    """Return the differences between the logits of some nodes and the formulas."""
    return largest_error(target, written, oracles.Eagle(written, target), recorder, texts, most)


@pytest.mark.sampled
@pytest.mark.parametrize("name", grid(HEADS, {"speculators", "eagle", "fc norm, norm of output", "shares both"}))
def test_logits_are_those_of_the_formulas(target: LoadedModel, tmp_path: Path, name: str) -> None:
    """In both layouts, with every flag: at the roots and at drafted nodes."""
    written = folders.write_eagle(tmp_path / "head", **HEADS[name])
    recorder, texts = served(target, written, SPECULATIONS["chains"], few=True)
    assert errors(target, written, recorder, texts, most=30) < 1e-3


@pytest.mark.parametrize(
    "flag",
    grid(["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "logit_scale"], {"norm_before_residual"}),
)
def test_every_flag_changes_the_logits(target: LoadedModel, tmp_path: Path, flag: str) -> None:
    plain = folders.write_eagle(tmp_path / "head", layout="eagle", fc_norm=flag == "fc_norm")
    changed = {"norm_before_fc": True} if flag == "norm_before_fc" else {flag: 2.0 if flag == "logit_scale" else True}
    if flag == "fc_norm":
        changed = {"fc_norm": False}
    written = folders.write_eagle(tmp_path / "head", layout="eagle", **changed)
    assert written.folder == plain.folder
    recorder, texts = served(target, written, SPECULATIONS["chains"], few=True)
    assert errors(target, written, recorder, texts, most=12) < 1e-3
    assert errors(target, plain, recorder, texts, most=12) > 1e-2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> folders.Written:
    """A head that agrees with nothing."""
    return folders.write_eagle(tmp_path_factory.mktemp("eagle") / "head", draft_vocabulary=83, scale=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(SPECULATIONS, {"tree"}))
def test_logits_do_not_depend_on_what_came_before(target: LoadedModel, written: folders.Written, name: str) -> None:
    """Logits are those of a fresh text."""
    recorder, texts = served(target, written, SPECULATIONS[name])
    assert errors(target, written, recorder, texts) < 1e-3


def test_texts_are_read_in_passes_of_bounded_size(target: LoadedModel, written: folders.Written) -> None:
    def short(readings: Any, rows: Any, ends_wanted: bool) -> Any:
        return readings(rows, ends_wanted, most_rows=7)

    with instead(eagle, "readings", short), instead("engine.drafting.head", "readings", short):
        recorder, texts = served(target, written, SPECULATIONS["chains"])
    assert errors(target, written, recorder, texts) < 1e-3


def one_layer_off(place_of: Any, decoder: CpuDecoder, number: int) -> int:
    """Shift the layer at which a CPU's decoder stores the state that enters a layer."""
    return int(place_of(decoder, number + 1))


def of_another_token(before: Any, *operands: Any) -> Any:
    return np.roll(before(*operands), 1)


def of_the_first_parent(places_of: Any, *operands: Any) -> Any:
    places = places_of(*operands)
    return places._replace(parents=tuple(parent_N * 0 for parent_N in places.parents))


def keeping_drafts(append: Any, scheduler: Scheduler, sequence: Running, row: Row, emission: Emission) -> Any:
    sequence.num_draft_computed += emission.num_draft_kept
    return append(scheduler, sequence, row, emission)


@contextmanager
def without_map(head: type[Head]) -> Iterator[None]:
    """Take the numbers of a head's tokens for the target's."""
    head.target_ids = property(lambda _: None, lambda *_: None)  # type: ignore[assignment]
    try:
        yield
    finally:
        del head.target_ids


WRONG: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "states of one layer before": lambda: instead(CpuDecoder, "_place_of", one_layer_off),
    "states of another token": lambda: instead(reading, "_slots_before", of_another_token),
    "states of another parent": lambda: instead("engine.drafting.head", "places_of", of_the_first_parent),
    "accepted rows as they were drafted": lambda: instead(Scheduler, "_append", keeping_drafts),
    "no map of tokens": lambda: without_map(Head),
}


@pytest.mark.parametrize("name", grid(WRONG, {"accepted rows as they were drafted"}))
def test_wrong_variants_are_found_out(target: LoadedModel, written: folders.Written, name: str) -> None:
    with WRONG[name]():
        recorder, texts = served(target, written, SPECULATIONS["chains"])
    assert errors(target, written, recorder, texts) > 1e-2


# -- the output ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel]:
    """A pair whose output can be enumerated; the head knows three of the four tokens."""
    target = folders.target(output_distribution.VOCABULARY, layers=2, spread=0.25)
    written = folders.write_eagle(
        tmp_path_factory.mktemp("small") / "head",
        vocabulary=output_distribution.VOCABULARY,
        draft_vocabulary=3,
        taps=(0, 1, 2),
    )
    return target, folders.load(written, target)


@pytest.mark.slow  # test_tables.py has tables without filters in the gate
def test_drafting_from_unfiltered_logits_is_rejected(small: tuple[LoadedModel, LoadedModel]) -> None:
    """The table of draft distributions is filtered, and the tokens come from what it was before."""

    def unfiltered(
        node_distributions: Any, rows: Any, nodes: Any, logits_NV: Tensor, parameters: Any, probs_NV: Tensor
    ) -> Any:
        node_distributions(rows, nodes, logits_NV, parameters, probs_NV)
        return logits_NV.softmax(-1), logits_NV

    filtered = output_distribution.SAMPLINGS["filtered"]
    with instead(chains, "node_distributions", unfiltered), level_by_level():
        counts = output_distribution.sample(
            small, output_distribution.SPECULATIONS["bv_race 4"], filtered, num_answers=5000
        )
    assert (
        output_distribution.g_test(counts, output_distribution.exact_distribution(small[0], filtered))
        < output_distribution.ALPHA
    )


# -- what is served with a head --------------------------------------------------------------------


def test_cached_prefixes_are_those_of_a_server_without_a_head(target: LoadedModel, written: folders.Written) -> None:
    """Also where requests that do not speculate have left them, longer than a step."""
    common = tiny.prompts(VOCABULARY, [70])[0]
    texts = [common, common, common + tiny.prompts(VOCABULARY, [9])[0], common[:40]]
    hits = []
    for draft in (None, folders.load(written, target)):
        engine = tiny.build(target, draft, budget=32, block_size=4)
        for number, text in enumerate(texts):
            speculation = SPECULATIONS["chains"] if draft and number % 2 else tiny.OFF
            tiny.run(engine, [tiny.request(str(number), text, speculation, temperature=1.0, seed=number)])
        hits.append((engine.scheduler.num_cache_hits, engine.scheduler.num_cache_queries))
    assert hits[0] == hits[1]
    assert hits[0][0] > 100


def test_without_a_head_nothing_is_stored(target: LoadedModel, written: folders.Written) -> None:
    plain, with_head = tiny.build(target, None), tiny.build(target, folders.load(written, target))
    assert plain.target.storage.hidden is None
    hidden = with_head.target.storage.hidden
    assert hidden is not None
    assert hidden.shape[1] == len(folders.TAPS) * folders.TARGET_WIDTH
    plan = with_head.facts.memory_plan
    assert plan["kv_cache"] == (hidden.nbytes + with_head.target.storage.keys.nbytes * 2)
    assert with_head.draft_runner is not None
    assert plan["draft_kv_cache"] == 2 * with_head.draft_runner.storage.keys.nbytes
