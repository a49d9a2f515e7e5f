"""A whole step without a model: drafting, text drafts, every rule's verdict.

`draw_chains` and `verify_chains` as the engine calls them, on logits that are looked up in a small
world. What a row emits is completed by the target to three tokens, whose law must be the target's
own, in each kind of row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import engine.step.verify as verifying
from engine.attention.inputs import SequenceInput
from engine.cpu.verdict import verify_at_once
from engine.drafting import draft as drafting_module
from engine.drafting.chains import draw_chains
from engine.drafting.draft import Draft, with_tokens
from engine.drafting.model import ModelDrafter
from engine.kernels.protocol import ChainNoise, Chains, ProbsTable
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.noise import Purpose
from engine.plan import Emission, Plan, Row
from engine.request import Sampling, Speculation, TextDraft
from engine.speculation.theory import Law
from engine.speculation.topology import merge_chains
from engine.speculation.verification import OverAcceptance
from engine.speculation.verification.text_drafts import below, refuse, walk
from tests.oracles.enumeration import Path, Rows, TabularModel
from tests.sampling.test_distribution import reference
from tests.speculation.served import KERNELS, Batch, Fit, RequestCase, fit, small_world
from tests.wrong import instead

ALPHA = 1e-6
NUM_ROWS = 1_500
"""Rows of every type."""
VOCABULARY, NUM_TOKENS, END = 4, 3, 10
CPU = torch.device("cpu")
WORLD = small_world("generic", VOCABULARY, 11)
TEXT_DRAFTS = (TextDraft("prediction", (0, 1, 2)), TextDraft("prompt_lookup", (0, 2)), TextDraft("prompt_lookup", (3,)))


def drafts(rule: str, *fanout: int, **more: Any) -> dict[str, Any]:
    """A row's fields: children by depth as a tree where a node below the root has several."""
    tree = fanout if max(fanout[1:], default=1) > 1 else ()
    speculation = Speculation(rule=rule, num_drafts=int(np.prod(fanout)), draft_length=len(fanout), tree=tree, **more)
    return {"speculation": speculation, "fanout": fanout}


OFF = {"speculation": Speculation(), "fanout": ()}
ROWS: dict[str, dict[str, Any]] = {
    "bv_race with text drafts": {**drafts("bv_race", 2, 1), "text_drafts": TEXT_DRAFTS},
    "block": drafts("block", 1, 1, 1),
    "block with text drafts": {**drafts("block", 1, 1), "text_drafts": TEXT_DRAFTS},
    "a tree with text drafts": {**drafts("traversal", 2, 2), "text_drafts": TEXT_DRAFTS},
    "late children": drafts("greedy", 1, 3),
    "text drafts alone": {**OFF, "text_drafts": TEXT_DRAFTS},
    "nothing": OFF,
    "one text draft": {**drafts("token", 1, 1), "text_drafts": TEXT_DRAFTS[:1]},
    "without replacement": {**drafts("rrs_without_replacement", 3, 1), "text_drafts": TEXT_DRAFTS[1:]},
    "spechub": drafts("spechub", 2, 2),
    "filtered": {**drafts("bv_race", 3, 1), "sampling": {"temperature": 0.7, "top_k": 3}},
    "seed-stable": {**drafts("bv_race", 2, 1), "sampling": {"seed_stable": True}},
    "first token": drafts("spectr_gbv", 2, 1),
}
"""Fields of the rows by kind; of the last one, one token counts."""


@dataclass
class LookedUp:
    """A draft model's runner whose logits are the logarithms of the world's draft laws."""

    device: ClassVar[torch.device] = torch.device("cpu")
    kernels: ClassVar[Kernels] = TORCH
    vocab_size: ClassVar[int] = VOCABULARY
    world: TabularModel
    paths: dict[int, list[Path]] = field(default_factory=dict)
    """Nodes that are in the cache, by sequence."""

    def prepare(self, passes: Sequence[Sequence[SequenceInput]]) -> Sequence[Sequence[SequenceInput]]:
        return passes

    def run(self, parts: Sequence[SequenceInput], tokens_N: Tensor | None = None) -> Tensor:
        tokens = iter([] if tokens_N is None else tokens_N.tolist())
        wanted: list[Path] = []
        for part in parts:
            paths = self.paths.setdefault(part.block_ids[0], [])
            cached = len(part.nodes.cached_depths)
            assert cached == len(paths), "nodes enter a pass level by level"
            for number in range(len(part.nodes.depths)):
                above = [paths[i] for i in np.flatnonzero(part.nodes.ancestry[number, :cached])]
                paths.append((*max(above, key=len, default=()), next(tokens)))
                assert len(paths[-1]) == part.nodes.depths[number]
            seen: list[Path] = [()] * len(part.input_ids) + paths[cached:]
            wanted += seen[part.wanted]
        return logarithms(self.world.draft, wanted)


def logarithms(rows: Rows, paths: Sequence[Path]) -> Tensor:
    """[N, V] logits whose laws at temperature 1 are those of the paths."""
    return torch.tensor(np.array([rows[path] for path in paths])).float().log()


def row_of(number: int, fields: dict[str, Any]) -> Row:
    more = {**fields, "sampling": Sampling(seed=number, **fields.get("sampling", {}))}
    return Row(
        sequence_id=number,
        input_ids=(0,),
        first_index=END - 1,
        draft_input_ids=(0,) if fields["fanout"] else (),
        draft_first_index=END - 1,
        block_ids=(number,),
        emits=True,
        **more,
    )


def step(
    rows: Sequence[Row], most_unmerged: int = 0, world: TabularModel = WORLD, kernels: Kernels = KERNELS
) -> tuple[Draft, list[Emission]]:
    """Draft and verify the rows in one step."""
    plan = Plan(tuple(rows))
    drafter = ModelDrafter(LookedUp(world))  # type: ignore[arg-type]
    draft = draw_chains(plan, drafter, VOCABULARY, CPU, kernels, most_unmerged)
    assert draft is not None
    assert (draft.tokens_M is None) == (most_unmerged == 0)
    paths: list[Path] = []
    for tree in (draft if draft.tokens_M is None else with_tokens(draft, draft.tokens_M.tolist())).trees:
        nodes: list[Path] = [()]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            nodes.append((*nodes[parent], token))
        paths += nodes
    logits_NV = logarithms(world.target, paths)
    verdict = verify_at_once(plan, draft, logits_NV) or verifying.verify_chains(plan, draft, logits_NV)
    return draft, list(verdict.emissions)


def law_below(path: Path, sampling: dict[str, Any]) -> Law:
    """The target law, temperature and filters by hand."""
    return reference(np.log(np.asarray(WORLD.target[path])), Sampling(**sampling))


def fits(names: Sequence[str] = tuple(ROWS), seed: int = 0, most_unmerged: int = 0) -> dict[str, Fit]:
    """Return the fit of each row type's texts; without text drafts if not merged."""
    count = len(names)
    fields = {
        name: {**ROWS[name], "text_drafts": () if most_unmerged else ROWS[name].get("text_drafts", ())}
        for name in names
    }
    rows = [row_of(seed + i, fields[names[i % count]]) for i in range(NUM_ROWS * count)]
    chance = np.random.default_rng(seed)
    emissions = step(rows, most_unmerged)[1]
    fit_by_row = {}
    for i, name in enumerate(names):
        sampling, num_tokens = ROWS[name].get("sampling", {}), 1 if name == "first token" else NUM_TOKENS
        laws: dict[Path, Law] = {}
        expected: dict[Path, float] = {(): 1.0}
        for _ in range(num_tokens):
            laws |= {path: law_below(path, sampling) for path in expected}
            expected = {(*path, x): p * laws[path][x] for path, p in expected.items() for x in range(VOCABULARY)}
        texts = []
        for emission in emissions[i::count]:
            text = (*emission.accepted, emission.next_token)
            while len(text) < num_tokens:
                text = (*text, int(chance.choice(VOCABULARY, p=laws[text])))
            texts.append(text[:num_tokens])
        fit_by_row[name] = fit(texts, expected)
    return fit_by_row


@pytest.mark.sole("the law of a step")
def test_rows_of_every_kind_have_the_target_s_law() -> None:
    assert {name for name, found in fits().items() if found.p_value < ALPHA} == set()


MANY = 10**6


@pytest.mark.slow
def test_the_law_needs_no_merging_of_equal_nodes() -> None:
    """The host receives the tokens with the verdict."""
    assert {name for name, found in fits(seed=1, most_unmerged=MANY).items() if found.p_value < ALPHA} == set()


def test_tokens_of_other_nodes_are_rejected() -> None:
    """The target verifies, and the host accepts, what each node's own chain has drawn."""
    drafting_module.layout_of.cache_clear()
    with instead(drafting_module, "_places", lambda places, *operands: np.roll(places(*operands), 1)):
        fit_by_row = fits(("bv_race with text drafts", "without replacement"), 1, MANY)
    drafting_module.layout_of.cache_clear()
    assert min(one.p_value for one in fit_by_row.values()) < ALPHA


def shared_numbers(uniform: Any, seed: Any, position: Any, purpose: Any, chain: Any = 0, depth: Any = 0) -> Any:
    """One number for following a text draft and for drawing the next token."""
    return uniform(seed, position, Purpose.RESIDUAL if purpose == Purpose.TEXT_DRAFT else purpose, chain, depth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("refuse", lambda *_: None), ("uniform", shared_numbers)],
)
def test_wrong_steps_are_rejected(name: str, wrong: Callable[..., Any]) -> None:
    """The whole law after a refused text draft; one number used twice."""
    with instead(verifying, name, wrong):
        # Because of a rule that no kernel has, plain operations verify the step.
        fit_by_row = fits(("text drafts alone", "bv_race with text drafts", "block with text drafts", "one text draft"))
    assert min(one.p_value for one in fit_by_row.values()) < ALPHA


def test_emissions_follow_the_tree_of_their_row() -> None:
    """Counts of text drafts are of what is in the row's tree."""
    names = tuple(ROWS)
    rows = [row_of(i, {**ROWS[names[i % len(names)]], "reports_drafts": i < 100}) for i in range(300)]
    draft, emissions = step(rows)
    for row, tree, emission in zip(rows, draft.trees, emissions, strict=True):
        texts = [tuple(tree.tokens[node - 1] for node in path[1:]) for path in tree.paths]
        accepted = len(emission.accepted)
        assert emission.chains == (tuple(filter(None, texts)) if row.reports_drafts else ())
        following = [rank for rank, text in enumerate(texts) if text[:accepted] == emission.accepted]
        assert following
        assert (
            emission.num_nodes == tree.num_nodes == len({text[:i] for text in texts for i in range(1, len(text) + 1)})
        )
        # The draft model has never seen a chain's last token.
        assert emission.num_draft_kept <= min(accepted, max(0, row.draft_length - 1))
        assert row.text_drafts or emission.num_draft_kept == min(accepted, max(0, row.draft_length - 1))
        assert [count.name for count in emission.text_draft_counts] == [one.source for one in row.text_drafts]
        assert sum(count.num_accepted for count in emission.text_draft_counts) <= accepted


@pytest.mark.parametrize("residual", ["optimal", "target"])
def test_over_acceptance_has_its_own_law_and_reports_its_bias(residual: str) -> None:
    """Computed by hand along every path: b = min(1, (p + eps)/q), then norm (p - b q)+ or p."""
    epsilon, biases = 0.08, []
    world = small_world("generic", VOCABULARY, 5)
    kinds = [RequestCase(world, (1, 1)), RequestCase(world, ()), RequestCase(world, (1, 1, 1))]
    rule = OverAcceptance(epsilon, residual)  # type: ignore[arg-type]

    def verify(*parts: Any) -> Any:
        verdict = rule(*parts)
        assert verdict.bias_B is not None
        biases.extend(verdict.bias_B.tolist())
        return verdict

    batch = Batch(kinds, 8000, 3, torch.float32)
    for number, (kind, emitted) in enumerate(zip(kinds, batch.run(verify, 1), strict=True)):
        law: dict[tuple[Path, int], float] = {}
        bias: dict[Path, float] = {}

        def go_on(path: Path, probability: float, length: int, law: Any = law, bias: Any = bias) -> None:
            p, q = (np.asarray(rows[path]) for rows in (world.target, world.draft))
            if len(path) == length:
                law.update({(path, x): probability * p[x] for x in range(VOCABULARY)})
                return
            kept = np.minimum(q, p + epsilon)
            redrawn = np.maximum(p - kept, 0) / np.maximum(p - kept, 0).sum() if residual == "optimal" else p
            law.update({(path, x): probability * (1 - kept.sum()) * redrawn[x] for x in range(VOCABULARY)})
            distance = 0.5 * np.abs(kept + (1 - kept.sum()) * redrawn - p).sum()
            bias[path] = bias.get(path[:-1], 0.0) + distance if path else distance
            for x in range(VOCABULARY):
                go_on((*path, x), probability * kept[x], length)

        go_on((), 1.0, kind.length)
        assert fit(emitted.first, law).p_value > ALPHA
        for (accepted, _), reported in list(zip(emitted.first, biases[number :: len(kinds)], strict=True))[:500]:
            decided = accepted[: kind.length - 1] if len(accepted) == kind.length else accepted
            assert reported == pytest.approx(bias[decided] if kind.length else 0.0, abs=1e-6)


def test_refused_tokens_leave_what_they_must() -> None:
    """A law of which nothing would be left stays; others are scaled to 1."""
    laws = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    for refused, expected in (
        ([(), ()], [[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]),
        ([(0,), (1, 0)], [[0.0, 0.5, 0.5], [0.5, 0.5, 0.0]]),
        ([(2, 1), (2,)], [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]),
    ):
        changed = laws.clone()
        with torch.device("meta"):
            refuse(changed, [0, 1], refused)
        assert changed.tolist() == [*torch.tensor(expected).tolist(), laws[2].tolist()]
        assert changed.dtype == laws.dtype


def test_chains_continue_at_the_depth_where_each_walk_ends() -> None:
    """Also a request that keeps its first chain without tokens."""
    number_CX = torch.arange(5).unsqueeze(1) * 10 + torch.arange(4)
    laws_NV = torch.zeros((60, 3))
    leads_CL = torch.tensor([[True, True, False]] * 5)
    chains = Chains(
        number_CX[:, :3] + 100,
        torch.tensor([3, 3, 2, 2, 0]),
        torch.tensor([0, 0, 1, 1, 2]),
        ProbsTable(laws_NV, number_CX[:, :3], TORCH),
        (3, 2),
        leads_CL,
    )
    numbers = torch.arange(5, dtype=torch.float64)
    deep_CL = numbers.unsqueeze(1).expand(5, 3)
    noise = ChainNoise(deep_CL, numbers, numbers + 10, deep_CL + 20, numbers + 30)
    lives_C, offset_C = np.array([False, True, False, False, False]), np.array([9, 2, 9, 9, 9])
    request_C, root_C = np.array([0, 0, 1, 1, 2]), np.array([50, 51, 52, 53, 54])
    with torch.device("meta"):
        rest = below(chains, ProbsTable(laws_NV, number_CX, TORCH), noise, request_C, offset_C, lives_C, root_C)
    assert rest.origin_C.tolist() == [1, 2, 4]
    assert rest.chains.length_C.tolist() == [1, 0, 0]
    assert rest.chains.request_C.tolist() == [0, 1, 2]
    assert rest.chains.tokens_CL[0, 0] == 112
    assert rest.chains.draft.row_CX[0, 0] == 12
    assert rest.chains.leads_CL is not None
    assert rest.chains.leads_CL[:, 0].tolist() == [False, True, True]
    assert rest.target.row_CX[0, :2].tolist() == [51, 13]
    assert rest.target.row_CX[1:, 0].tolist() == [52, 54]
    # A decision keeps the number of its place below the root, not of its place in the text.
    assert torch.equal(rest.noise.accept_CL, deep_CL[[1, 2, 4]])
    assert rest.noise.chosen_residual_C.tolist() == [31, 32, 34]


def test_a_text_draft_that_cannot_follow_is_not_followed() -> None:
    """The next one is not, either, and its share begins where the last one's ends."""
    tree = merge_chains([[1], [2, 0], [3]])
    assert walk(tree, 0, {1: 0.0, 2: 0.0, 3: 0.5, 4: 0.0}, [0.0, 0.0]).refused == [1, 2, 3]
    shares = {1: 0.25, 2: 0.25, 3: 0.0, 4: 0.25}
    walks = [walk(tree, 0, shares, [number, 0.0]) for number in (0.2, 0.25, 0.5, 0.75)]
    assert [one.path for one in walks] == [[0, 1], [0, 2], [0, 4], [0]]
    assert [one.rank for one in walks] == [0, 1, 2, 0]
    assert [one.refused for one in walks] == [[], [0], [], [1, 2, 3]]
    deep = walk(merge_chains([[2, 0, 1], [2, 0, 3]]), 0, {1: 1.0, 2: 1.0, 3: 0.0, 4: 0.5}, [0.5, 0.5, 0.5])
    assert (deep.path, deep.refused, deep.depth) == ([0, 1, 2], [1, 3], 2)
    # A drawn chain is not followed.
    assert walk(tree, 1, shares, [0.2, 0.0]).path == [0, 2]
