"""Trees of the most likely tokens depend on the draft's logits alone, and are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from engine.drafting import chains, draft
from engine.kernels.protocol import Filters
from engine.request import Speculation
from engine.speculation.rule_facts import MOST_LIKELY
from engine.start.loading import LoadedModel
from engine.step import verify as target
from tests.engine import test_output_distribution as output_distribution
from tests.engine import tiny
from tests.grid import grid
from tests.heads import folders
from tests.wrong import by_distributions, calls_of, instead

CHAINS = output_distribution.drafts("nss", 3, draft_method=MOST_LIKELY)
TREE = output_distribution.drafts("nss", 4, draft_method=MOST_LIKELY, tree=(2, 2))
HEADS: dict[str, dict[str, Any]] = {"dflash": {"draft_vocabulary": 3}, "dspark": {"draft_vocabulary": 3}}


def pair_of(drafter: str, folder: Path) -> tuple[LoadedModel, LoadedModel]:
    """A target whose output can be enumerated, and what drafts for it."""
    vocabulary = output_distribution.VOCABULARY
    if drafter == "model":
        return tuple(tiny.llama(seed=seed, vocabulary=vocabulary, layers=1, spread=0.25) for seed in (21, 22))  # type: ignore[return-value]
    of = folders.target(vocabulary, layers=2, spread=0.25)
    if drafter == "eagle3":
        written = folders.write_eagle(folder, vocabulary=vocabulary, draft_vocabulary=3, taps=(0, 1, 2))
    else:
        written = folders.write_block(folder, drafter, vocabulary=vocabulary, draft_vocabulary=3, taps=(0, 1, 2))
    return of, folders.load(written, of)


# A draft model with every sampling; heads, whose distributions reach the trees in the same tables,
# with one each.
CASES = [
    *(("model", TREE, sampling) for sampling in ("plain", "filtered", "penalties", "grammar", "seed-stable")),
    *(("model", CHAINS, sampling) for sampling in ("filtered", "grammar")),
    *(("dflash", TREE, sampling) for sampling in ("plain", "grammar")),
    ("dflash", CHAINS, "filtered"),
    ("dspark", TREE, "filtered"),
    ("dspark", CHAINS, "penalties"),
    ("eagle3", TREE, "plain"),
    ("eagle3", CHAINS, "seed-stable"),
]
IN_THE_GATE = [
    ("model", TREE, "filtered"),
    ("dflash", TREE, "plain"),
    ("dflash", CHAINS, "filtered"),
]


@pytest.mark.sole("sampled answers with likely trees")
@pytest.mark.sampled
@pytest.mark.parametrize(("drafter", "speculation", "sampling"), grid(CASES, IN_THE_GATE))
def test_output_has_the_target_s_distribution(
    tmp_path: Path, drafter: str, speculation: Speculation, sampling: str
) -> None:
    pair = pair_of(drafter, tmp_path / "head")
    counts = output_distribution.sample(pair, speculation, output_distribution.SAMPLINGS[sampling])
    expected = output_distribution.exact_distribution(pair[0], output_distribution.SAMPLINGS[sampling])
    assert output_distribution.g_test(counts, expected) > output_distribution.ALPHA


@pytest.mark.parametrize("drafter", ["model", "dflash"])
def test_trees_do_not_depend_on_the_seed(tmp_path: Path, drafter: str) -> None:
    """Requests of another method draft otherwise."""
    pair = pair_of(drafter, tmp_path / "head")

    def drafted(speculation: Speculation) -> dict[tuple[int, ...], set[tuple[tuple[int, ...], ...]]]:
        engine = tiny.build(*pair, max_model_len=32, max_draft_length=3)
        requests = [
            tiny.request(str(seed), output_distribution.PROMPT, speculation, max_tokens=6, temperature=1.0, seed=seed)
            for seed in range(40)
        ]
        requests = [msgspec.structs.replace(one, reports_drafts=True) for one in requests]
        found: dict[tuple[int, ...], set[tuple[tuple[int, ...], ...]]] = {}
        for outcomes in tiny.run(engine, requests).outcomes.values():
            text: tuple[int, ...] = ()
            for outcome in outcomes:
                if outcome.draft_length == speculation.draft_length and outcome.drafts:
                    found.setdefault(text, set()).add(tuple(map(tuple, outcome.drafts)))
                text = (*text, *outcome.token_ids)
        return found

    likely = drafted(TREE)
    assert len(likely) > 4
    assert all(len(trees) == 1 for trees in likely.values())
    assert any(len(trees) > 1 for trees in drafted(msgspec.structs.replace(TREE, draft_method="iid")).values())


@contextmanager
def look_at_the_target_s_numbers() -> Iterator[None]:
    """If the number that samples the second token is high, draft the least likely tokens."""

    def peeking(children: Any, kernels: Any, method: str, weights_NV: Tensor, uniform_NK: Tensor) -> Tensor:
        tokens_NK = children(kernels, method, weights_NV, uniform_NK)
        made = [call.result for call in calls if call.result.ndim == 3][-1]
        apart = made.shape[1] // len(tokens_NK)
        is_high_N = made[1][::apart, 1] > 0.5
        others_NK = (-weights_NV).topk(tokens_NK.shape[1], dim=1).indices
        return others_NK.where(is_high_N.unsqueeze(1), tokens_NK)

    with calls_of(chains, "to_device") as calls, instead(chains, "children", peeking):
        yield


def unfiltered() -> AbstractContextManager[Any]:
    """Walk by the target's distribution before its filters."""

    def without_filters(node_distributions: Any, rows: Any, nodes: Any, logits_NV: Tensor, parameters: Any) -> Any:
        return node_distributions(rows, nodes, logits_NV, replace(parameters, filters=Filters()))

    return instead(target, "node_distributions", without_filters)


def another_parent() -> AbstractContextManager[Any]:
    """Walk on below the node of a neighbouring chain."""

    def moved(of: Any, trees: Any, layout: Any) -> Any:
        table = of(trees, layout)
        node_CX = table.node_CX.clone()
        node_CX[:, 1] = node_CX.view(-1, 4, node_CX.shape[1]).roll(2, 1)[..., 1].flatten()
        return replace(table, node_CX=node_CX)

    return instead(draft.NodeTable, "of", moved)


WRONG: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "a tree that depends on what is sampled": (look_at_the_target_s_numbers, "plain"),
    "unfiltered": (unfiltered, "filtered"),
    "another parent": (another_parent, "plain"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", grid(WRONG, {"a tree that depends on what is sampled", "another parent"}))
def test_wrong_variants_are_rejected(tmp_path: Path, name: str) -> None:
    wrong, sampling = WRONG[name]
    pair = pair_of("model", tmp_path)
    with by_distributions(), wrong():
        counts = output_distribution.sample(pair, TREE, output_distribution.SAMPLINGS[sampling], num_answers=2000)
    assert (
        output_distribution.g_test(
            counts, output_distribution.exact_distribution(pair[0], output_distribution.SAMPLINGS[sampling])
        )
        < output_distribution.ALPHA
    )
