"""Answers of every type of head have the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import MODEL
from engine.errors import RequestError
from engine.request import Speculation
from engine.scheduling.scheduler import Scheduler
from engine.speculation.conditions import DRAFTER_FACTS, FIXED_DISTRIBUTION
from engine.start.loading import LoadedModel
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders
from tests.heads.recording import SPECULATIONS, Recorder
from tests.wrong import calls_of, instead

Pair = tuple[LoadedModel, LoadedModel]
SMALL = {"vocabulary": output_distribution.VOCABULARY, "taps": (0, 1, 2)}
KINDS: dict[str, Callable[[Path], folders.Written]] = {
    "eagle3": lambda folder: folders.write_eagle(folder, draft_vocabulary=3, **SMALL),
    "peagle": lambda folder: folders.write_eagle(folder, kind="peagle", draft_vocabulary=3, **SMALL),
    "dflash": lambda folder: folders.write_block(folder, draft_vocabulary=3, **SMALL),
    "dspark": lambda folder: folders.write_block(folder, kind="dspark", draft_vocabulary=3, **SMALL),
    "dspark, recurrent": lambda folder: folders.write_block(
        folder, kind="dspark", markov_head_type="rnn", draft_vocabulary=3, **SMALL
    ),
    "dflash2": lambda folder: folders.write_block(folder, kind="dflash2", **SMALL),
    "mtp": lambda folder: folders.write_mtp(folder, output_distribution.VOCABULARY, layers=2),
}
"""Heads of targets whose output can be enumerated; all but two know three of the four tokens."""
# All heads with chains and a tree. Rules only read the tables that these fill, so further rules
# have one head each.
CASES = [
    *(
        (kind, rule, sampling)
        for kind in KINDS
        for rule, sampling in (
            ("bv_race 4", "plain"),
            ("bv_race 4", "filtered"),
            ("bv_race 4", "penalties"),
            ("bv_race 4", "grammar"),
            ("traversal tree", "plain"),
        )
    ),
    ("eagle3", "traversal tree", "filtered"),
    ("dspark, recurrent", "traversal tree", "grammar"),
    ("dspark", "traversal iid", "plain"),
    ("eagle3", "rrs 4", "plain"),
    ("dflash2", "rrs 4", "plain"),
]
IN_THE_GATE = {
    *((kind, "bv_race 4", "grammar") for kind in ("mtp", "dspark, recurrent", "peagle")),
    ("dspark", "bv_race 4", "filtered"),
    ("dspark", "traversal iid", "plain"),
    ("dflash2", "bv_race 4", "penalties"),
    ("eagle3", "bv_race 4", "plain"),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(kind: str) -> Pair:
        if kind not in made:
            written = KINDS[kind](tmp_path_factory.mktemp(kind) / "head")
            is_inside = kind == "mtp"
            target = (
                folders.load_target(written) if is_inside else folders.target(output_distribution.VOCABULARY, 2, 0.25)
            )
            made[kind] = target, folders.load(written, target)
            runner = tiny.build(*made[kind]).draft_runner
            assert runner is not None
            if tiny.DEVICE.type == "cpu":
                assert runner.fast_paths["fast decoder"] == (not is_inside)
        return made[kind]

    return pair


def p_value(pair: Pair, rule: str, sampling: dict[str, Any], **more: Any) -> float:
    speculation = output_distribution.SPECULATIONS[rule]
    counts = output_distribution.sample(pair, speculation, sampling, num_answers=1500, **more)
    prompt = more.get("prompt", output_distribution.PROMPT)
    return output_distribution.g_test(counts, output_distribution.exact_distribution(pair[0], sampling, prompt))


@pytest.mark.sole("sampled answers with a head")
@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "rule", "sampling"), grid(CASES, IN_THE_GATE))
def test_output_has_the_target_s_distribution(
    pairs: Callable[[str], Pair], kind: str, rule: str, sampling: str
) -> None:
    assert p_value(pairs(kind), rule, output_distribution.SAMPLINGS[sampling]) > output_distribution.ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("kind", grid(KINDS, {"eagle3"}))
def test_output_after_cached_prefixes_has_the_target_s_distribution(pairs: Callable[[str], Pair], kind: str) -> None:
    prompt = tuple(np.random.default_rng(1).integers(0, 4, 21).tolist())
    with calls_of(Scheduler, "check_invariants") as checked:
        found = p_value(pairs(kind), "bv_race 4", output_distribution.SAMPLINGS["plain"], prompt=prompt)
    assert checked[-1].operands[0].num_cache_hits > 1000
    assert found > output_distribution.ALPHA


@pytest.mark.sampled
@pytest.mark.parametrize("kind", grid(KINDS, {"eagle3", "dspark"}))
def test_answers_do_not_depend_on_the_load(pairs: Callable[[str], Pair], kind: str) -> None:
    """Prompts cut elsewhere, cached prefixes, preemption."""
    pair = pairs(kind)
    prompts = tiny.prompts(output_distribution.VOCABULARY, [20, 23, 60, 8, 1])
    requests = [
        tiny.request(str(number), prompt, SPECULATIONS["chains"], max_tokens=30, temperature=1.0, seed=number)
        for number, prompt in enumerate([*prompts, prompts[0]])
    ]
    crowded = tiny.run(tiny.build(*pair, num_blocks=20, budget=40), requests)
    assert crowded.num_preemptions > 0
    for request in requests:
        alone = tiny.run(tiny.build(*pair), [request])
        assert alone.tokens[request.request_id] == crowded.tokens[request.request_id]


def most_changed(pair: Pair, window: int = 0, num_blocks: int = 0) -> float:
    """Return the largest difference between draft distributions after one text."""
    engine = tiny.build(*pair, num_blocks=num_blocks, budget=60, draft_window=window, max_model_len=48)
    recorder = Recorder(engine)
    prompt = tiny.prompts(output_distribution.VOCABULARY, [12])[0]
    requests = [
        tiny.request(str(seed), prompt, SPECULATIONS["chains"], max_tokens=8, temperature=1.0, seed=seed)
        for seed in range(80)
    ]
    run = tiny.run(engine, requests)
    assert bool(run.num_preemptions) == bool(num_blocks)
    found: dict[tuple[int, ...], dict[int, Tensor]] = {}
    for node in recorder.nodes:
        root = [*prompt, *run.tokens[str(node.sequence)]][: node.length]
        found.setdefault((*root, *node.path), {})[node.length] = node.logits.softmax(-1)
    several = [torch.stack(list(by_root.values())) for by_root in found.values() if len(by_root) > 1]
    assert len(several) > 4
    return max((rows_NV - rows_NV[0]).abs().max().item() for rows_NV in several)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_s_distribution_after_a_text_changes_from_step_to_step(pairs: Callable[[str], Pair], kind: str) -> None:
    """Rules that need a fixed one are refused with it, by the facts that its engine has."""
    assert most_changed(pairs(kind)) > 0.02
    engine = tiny.build(*pairs(kind))
    known = engine.facts.drafters[MODEL]
    assert known == DRAFTER_FACTS[kind.partition(",")[0]]
    assert FIXED_DISTRIBUTION not in known.meets
    for rule in ("greedy_block", "spectr_gbv"):
        request = tiny.request("a", [1, 2], Speculation(rule=rule, num_drafts=1, draft_length=2))
        with pytest.raises(RequestError, match=f"rule '{rule}' would be biased with {known.title}"):
            engine.submit(request)


@pytest.mark.slow
def test_a_draft_model_s_distribution_after_a_text_is_fixed() -> None:
    """Also after preemption; a window that moves changes it, so such rules draft without one."""
    pair = tuple(tiny.llama(seed, output_distribution.VOCABULARY, spread=0.25) for seed in (1, 2))
    assert most_changed(pair) < 1e-5
    assert most_changed(pair, num_blocks=16) < 1e-5
    assert most_changed(pair, window=3) > 1e-3


WRONG = [(kind, sampling) for kind in KINDS for sampling in ("penalties", "grammar")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sampling"), grid(WRONG, {("eagle3", "penalties"), ("mtp", "grammar")}))
def test_verifying_without_the_drafted_tokens_above_a_node_is_rejected(
    pairs: Callable[[str], Pair], kind: str, sampling: str
) -> None:
    """Penalties and grammars then see the text alone."""
    with instead("engine.step.verify", "node_distributions", tiny.distributions_at_the_root):
        assert p_value(pairs(kind), "bv_race 4", output_distribution.SAMPLINGS[sampling]) < output_distribution.ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("kind", grid(KINDS, {"eagle3", "dspark"}))
def test_drafts_of_another_distribution_are_rejected(pairs: Callable[[str], Pair], kind: str) -> None:
    """Drawn all at once and level by level."""
    with tiny.with_drafts_of_another_distribution():
        assert p_value(pairs(kind), "bv_race 4", output_distribution.SAMPLINGS["plain"]) < output_distribution.ALPHA
