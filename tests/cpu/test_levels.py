"""Drafting in one call returns the loop's tokens and distributions, to the bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu import levels
from engine.cpu.compiled import draw_loop
from engine.cpu.drafting import CompiledDrafting, compiled
from engine.drafting import chains
from engine.drafting.draft import ChainShape, Layout, layout_of
from engine.drafting.eagle import EagleDrafter
from engine.drafting.model import ModelDrafter
from engine.drafting.tables import may_draw_at_once
from engine.kernels.protocol import ProbsTable
from engine.plan import Plan
from engine.request import Request, Speculation
from engine.sampling.distribution import DistributionParameters
from tests.engine import tiny
from tests.heads import folders
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="drafting on a CPU")

SHAPES = {
    "chain": Speculation(rule="block", num_drafts=1, draft_length=5),
    "chains": Speculation(rule="bv_race", num_drafts=4, draft_length=3),
    "tree": Speculation(rule="traversal", num_drafts=4, draft_length=3, tree=(2, 1, 2), draft_method="iid"),
    "late tree": Speculation(rule="traversal", num_drafts=4, draft_length=4, tree=(1, 1, 4, 1), draft_method="iid"),
    "off": tiny.OFF,
}


SAMPLINGS = (
    (1.0, 1.0, 0, 0.0),
    (0.7, 0.9, 0, 0.0),
    (1.0, 0.4, 0, 0.0),
    (0.0, 0.5, 3, 0.0),
    (0.6, 0.95, 20, 0.0),
    (1.3, 1.0, 4, 0.0),
    (1.2, 1.0, 0, 0.1),
    (1.2, 0.8, 7, 0.05),
)
"""Temperature, top_p, top_k and min_p."""


def requests(max_tokens: int = 16) -> list[Request]:
    """Every shape, warm and greedy, with and without filters, after several lengths."""
    made = []
    prompts = tiny.prompts(101, [3, 30, 9, 21, 60], seed=1)
    for number, (name, speculation) in enumerate(SHAPES.items()):
        for temperature, top_p, top_k, min_p in SAMPLINGS:
            made.append(
                tiny.request(
                    f"{name} {temperature} {top_p} {top_k} {min_p}",
                    prompts[number],
                    speculation,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    min_p=min_p,
                    seed=10 * number,
                )
            )
    return made


class Compared:
    """Calls that draw at once, each compared with the loop over levels."""

    def __init__(self) -> None:
        self.num_taken = self.num_equal = self.num_drawn = 0

        def draw(
            right: Any,
            drafting: Any,
            plan: Plan,
            layout: Layout,
            parameters: DistributionParameters,
            uniform_LC: Tensor,
        ) -> tuple[Tensor, ProbsTable]:
            drawn_CL, table = right(drafting, plan, layout, parameters, uniform_LC)
            if not may_draw_at_once(plan, layout):
                return drawn_CL, table
            drafter = drafting._drafter
            expected_CL, expected = chains.draw_by_level(drafter, plan, layout, parameters, uniform_LC)
            self.num_taken += 1
            self.num_drawn += len(expected.probs_NV)
            self.num_equal += torch.equal(drawn_CL, expected_CL) and torch.equal(table.probs_NV, expected.probs_NV)
            return expected_CL, expected

        self.calls = instead(CompiledDrafting, "draw", draw)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny.llama(seed=31)
    return target, tiny.perturbed(target, seed=3, amount=0.03)


@pytest.fixture(scope="module")
def head_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """An EAGLE-3 head that knows some of the target's tokens."""
    target = folders.target(vocabulary=101)
    folder = tmp_path_factory.mktemp("head") / "head"
    written = folders.write_eagle(folder, vocabulary=101, draft_vocabulary=83, scale=0.3)
    return target, folders.load(written, target)


@pytest.mark.sole("drafting in one call")
@pytest.mark.sampled
@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
@pytest.mark.parametrize("kind", [ModelDrafter, EagleDrafter])
def test_one_call_gives_what_the_loop_gives(
    pair: tuple[Any, Any],
    head_pair: tuple[Any, Any],
    kind: type[Any],
    together: bool,
) -> None:
    """With chunks of prompts, shared prefixes, ends and preemption."""
    compared = Compared()
    pair = pair if kind is ModelDrafter else head_pair
    engine = tiny.build(*pair, num_blocks=90, budget=48, max_draft_length=5)
    with compared.calls:
        for group in [requests()] if together else [[request] for request in requests(max_tokens=8)]:
            assert tiny.run(engine, group).num_accepted > 0 or not together
    assert compared.num_taken > 20
    assert compared.num_equal == compared.num_taken


def draw_for_next_chains(arrays: dict[str, Any]) -> None:
    """Let each node draw the tokens of the chains after its own, but of no chain after the last."""
    num_chains = arrays["tokens"].shape[1]
    first_chains = np.minimum(arrays["first_chains"] + 1, num_chains - 1)
    arrays.update(first_chains=first_chains, num_chains=np.minimum(arrays["num_chains"], num_chains - first_chains))


def draw_apart(arrays: dict[str, Any]) -> None:
    """Let chains through one node draw a token each."""
    arrays.update(leaders=np.broadcast_to(np.arange(arrays["tokens"].shape[1]), arrays["leaders"].shape).copy())


def hide_a_node(arrays: dict[str, Any]) -> None:
    """Hide from each row the first of the nodes that it sees. It still sees the text."""
    words, *others = arrays["seen"]
    arrays.update(seen=(words & (words - 1), *others))


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "another chain's number": lambda a: a.update(uniforms=np.roll(a["uniforms"], 1, 1)),
    "another level's number": lambda a: a.update(uniforms=np.roll(a["uniforms"], 1, 0)),
    "the temperature of another node": lambda a: a.update(temperatures=np.roll(a["temperatures"], 1)),
    "the top_p of another node": lambda a: a.update(top_ps=np.roll(a["top_ps"], 1)),
    "no top_p": lambda a: a.update(top_ps=np.ones_like(a["top_ps"])),
    "the top_k of another node": lambda a: a.update(top_ks=np.roll(a["top_ks"], 1)),
    "a token more": lambda a: a.update(top_ks=np.where(a["top_ks"] > 0, a["top_ks"] + 1, 0)),
    "the min_p of another node": lambda a: a.update(least_logs=np.roll(a["least_logs"], 1)),
    "no min_p": lambda a: a.update(least_logs=np.full_like(a["least_logs"], -np.inf)),
    "tokens of the next chains": draw_for_next_chains,
    "chains that share a node draw apart": draw_apart,
    "a node that is not seen": hide_a_node,
}
WRONG_OF_HEADS: dict[str, Callable[[dict[str, Any]], None]] = {
    "the state of another node": lambda a: a.update(parents=a["parents"] * 0),
    "the state of another token of the text": lambda a: a.update(
        entering_states=(np.roll(a["entering_states"][0], 1, 0), *a["entering_states"][1:])
    ),
    "another token of the target": lambda a: a.update(target_ids=np.roll(a["target_ids"], 1)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("wrong", [*WRONG, *WRONG_OF_HEADS])
def test_a_wrong_call_is_found_out(pair: tuple[Any, Any], head_pair: tuple[Any, Any], wrong: str) -> None:
    names = inspect.signature(draw_loop.draw_levels.py_func).parameters

    def spoilt(right: Any, *arguments: Any) -> None:
        named = dict(zip(names, arguments, strict=True))
        changed = named | levels.Draws(*named["draws"])._asdict()
        {**WRONG, **WRONG_OF_HEADS}[wrong](changed)
        draws = tuple(changed[name] for name in levels.Draws._fields)
        right(*(draws if name == "draws" else changed[name] for name in names))

    is_of_head = wrong in WRONG_OF_HEADS
    compared = Compared()
    with compared.calls, instead(draw_loop, "draw_levels", spoilt):
        tiny.run(tiny.build(*(head_pair if is_of_head else pair), max_draft_length=5), requests(max_tokens=8))
    assert compared.num_equal < compared.num_taken


@pytest.mark.parametrize(
    ("sampling", "speculation", "taken"),
    [
        ({}, SHAPES["chains"], True),
        ({}, Speculation(rule="block", num_drafts=1, draft_length=1), True),
        ({"temperature": 0.0}, SHAPES["chain"], True),
        ({"temperature": 0.0}, SHAPES["chains"], True),
        ({"top_p": 0.9}, SHAPES["chains"], True),
        ({"top_k": 5}, SHAPES["chains"], True),
        ({"min_p": 0.1}, SHAPES["chains"], True),
        ({"presence_penalty": 1.0}, SHAPES["chains"], False),
        ({"logit_bias": ((5, 2.0),)}, SHAPES["chains"], False),
        ({"seed_stable": True}, SHAPES["chain"], False),
        ({}, Speculation(rule="spechub", num_drafts=2, draft_length=2), False),
    ],
)
def test_rows_whose_distributions_need_more_take_the_loop(
    pair: tuple[Any, Any],
    sampling: dict[str, Any],
    speculation: Speculation,
    taken: bool,
) -> None:
    """One of them is enough: all rows of its steps take it."""
    compared = Compared()
    engine = tiny.build(*pair, max_draft_length=5)
    others = [tiny.request("plain", range(5, 15), SHAPES["chain"], max_tokens=6, temperature=1.0)] if not taken else []
    request = tiny.request(
        "one", range(5, 25), speculation, max_tokens=6, **{"temperature": 1.0, "seed": 3, **sampling}
    )
    with compared.calls:
        tiny.run(engine, [request, *others])
    assert compared.num_equal == compared.num_taken
    assert (compared.num_taken > 0) == taken


def test_models_of_other_vocabularies_take_the_loop() -> None:
    engine = tiny.build(tiny.llama(seed=1), tiny.llama(seed=1), max_draft_length=5)
    runner = engine.draft_runner
    assert runner is not None
    assert levels.levels_of(runner) is not None
    runner.num_embeddings = 100
    assert levels.levels_of(runner) is None
    assert engine.drafter is not None
    assert compiled(engine.drafter) is engine.drafter


@pytest.mark.slow
def test_models_of_other_backends_take_the_loop() -> None:
    with tiny.with_paged_models():
        engine = tiny.build(tiny.llama(seed=1), tiny.llama(seed=1))
    assert engine.draft_runner is not None
    assert levels.levels_of(engine.draft_runner) is None


def layout(with_trees: bool) -> Layout:
    """Chains of several lengths, rows that draft nothing, and trees, if wanted."""
    fanouts = [(3, 1, 1), (), (1, 1, 1, 1), (2,), *([(2, 1, 2), (1, 3)] if with_trees else []), (1,), ()]
    return layout_of(tuple(ChainShape(fanout, "iid", "iid") for fanout in fanouts), torch.device("cpu"))


@pytest.mark.parametrize("with_trees", [True, False])
def test_the_loop_s_chains_are_those_of_the_layout(with_trees: bool) -> None:
    one = layout(with_trees)
    found = levels._chains_of(one)
    through: dict[int, list[int]] = {}
    parents = {}
    level_rows: list[list[int]] = []
    for depth in range(one.max_length):
        rows = one.probs_row_CL[:, depth].tolist()
        drawing = [chain for chain, length in enumerate(one.length_C) if depth < length]
        level_rows.append(sorted({rows[chain] for chain in drawing}))
        for chain in drawing:
            through.setdefault(rows[chain], []).append(chain)
            above = level_rows[depth - 1].index(int(one.probs_row_CL[chain, depth - 1])) if depth else 0
            assert parents.setdefault(rows[chain], above) == above
        leader_C = one.levels[depth].leader_C
        assert found.leaders_LC[depth].tolist() == (
            list(range(one.num_chains)) if leader_C is None else leader_C.tolist()
        )
    numbers = range(one.num_probs)
    assert sorted(through) == list(numbers)
    assert found.first_chains.tolist() == [through[number][0] for number in numbers]
    assert found.num_chains.tolist() == [len(through[number]) for number in numbers]
    assert found.parents.tolist() == [parents[number] for number in numbers]
    assert found.parents.dtype == np.int64
    assert found.probs_ends.tolist() == np.cumsum([len(depth_rows) for depth_rows in level_rows]).tolist()
    assert one.are_independent
    others = layout_of((ChainShape((2, 1), "iid", "iid"), ChainShape((2,), "spechub", "iid")), torch.device("cpu"))
    assert not others.are_independent


def test_bounds_of_passes_are_those_of_each_pass_alone() -> None:
    from engine.cpu.decoder import parts_of

    one, sizes = layout(True), [[40, 1, 7, 3], [3, 1], [2], [1, 9, 1]]
    counts = np.concatenate(sizes).astype(np.int32)
    found = levels._bounds_of(one, tuple(map(len, sizes)), counts.tobytes())
    parts = [parts_of(np.cumsum(size) - size, np.array(size)) for size in sizes]
    assert found.parts.tolist() == np.concatenate(parts).tolist()
    probs_ends = levels._chains_of(one).probs_ends
    columns = [list(map(sum, sizes)), list(map(len, sizes)), list(map(len, parts))]
    assert found.ends.tolist() == np.stack([*np.cumsum(columns, 1), probs_ends], 1).tolist()
    most_distributions = max(np.diff(probs_ends, prepend=0))
    assert (found.most_rows, found.most_distributions, found.num_later_rows) == (51, most_distributions, 17)
