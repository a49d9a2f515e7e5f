"""The rules that serve: `RULES[name].verify` over drawn drafts and noise.

The enumeration of a rule is exact, but it is put together from the rule's parts; here the function
that the engine calls decides about tens of thousands of requests, and what it gives is compared
with the enumerated law and with the target's own (`served.py`). Seeds are fixed, so every test is
deterministic; wrong rules that it must reject are in `test_served_mutants.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from engine.drafting.numbers import draw_numbers
from engine.kernels.protocol import ChainNoise, Chains
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.speculation.conditions import LATE_BRANCHES, unmet
from engine.speculation.verification import RULES, OverAcceptance, Verify
from engine.speculation.verification.node import TopDown
from engine.speculation.verification.rrs import rrs
from engine.speculation.verification.traversal import leaders
from tests.grid import FAMILIES, grid
from tests.oracles.enumeration import RuleOutcome
from tests.speculation.exact import TabularModel, from_prefix, outcomes_of
from tests.speculation.served import KERNELS, Batch, Fit, NoiseOf, RequestCase, first_law, fit, small_world, text_law

ALPHA = 1e-6
NUM_REQUESTS = 66_000
"""Requests of every rule and draft method, in two batches or three."""

CORNERS = ("generic", "zeros", "near", "generic", "ties", "equal", "generic", "disjoint", "near")
CHAINS = ((2, 1), (1, 1, 1), (3, 1), (), (1, 1), (2, 1, 1), (2,), (1,), (4, 1), (2, 1, 1))
"""Children by depth: one chain to four, of one token to three, and none at all."""
TREES = ((2, 2), (1, 3), (), (3, 2), (2,), (2, 1, 2))
FEW = ((2,), (3,), (1,))
"""For the rule that solves a linear program for every law."""


@cache
def world_of(vocabulary: int, number: int) -> TabularModel:
    """Return a model by its number of tokens, and the number of its corner.

    More tokens allow more errors, and need more drafts and trees to enumerate.
    """
    return small_world(CORNERS[number], vocabulary, number)


def takes_trees(rule: str) -> bool:
    """Whether the rule is exact with trees that branch below the root."""
    return unmet(RULES[rule], LATE_BRANCHES) is None


CASES = [
    (rule, method, shapes, turn)
    for rule in RULES
    for method in RULES[rule].draft_methods
    for shapes, turn in (("chains", 0), ("chains", 1), ("trees", 0))
    if (takes_trees(rule) if shapes == "trees" else not turn or method == RULES[rule].draft_methods[0])
]


def kinds_of(rule: str, method: str, shapes: str, turn: int) -> list[RequestCase]:
    """Requests that the rule takes; with every turn the shapes meet other worlds."""
    known = RULES[rule]
    # Three tokens are all that can be most likely; a node of more drafts is filled up only without
    # replacement.
    most = {"spechub": 2, "greedy": 3, "most_likely": 3}.get(method, known.max_drafts or 4)
    wanted = {"chains": CHAINS, "trees": TREES}[shapes]
    if known.max_vocabulary is not None:
        wanted = FEW if shapes == "chains" else ((2, 2),)
    vocabulary = 3 if shapes == "trees" or rule == "traversal" else 4 if takes_trees(rule) else 5
    return [
        RequestCase(world_of(vocabulary, (i + 4 * turn) % len(CORNERS)), tuple(min(n, most) for n in shape), method)
        for i, shape in enumerate(wanted)
    ]


def fits(
    rule: str,
    kinds: Sequence[RequestCase],
    dtype: torch.dtype = torch.float32,
    num_requests: int = NUM_REQUESTS // 2,
    num_tokens: int = 3,
    noise: NoiseOf | None = None,
    kernels: Kernels = KERNELS,
) -> tuple[Fit, Fit]:
    """Return the fits of first steps to the enumeration, and of texts to the target."""
    batch = Batch(kinds, num_requests // len(kinds), 1, dtype, kernels)
    steps, texts = Fit(), Fit()
    for kind, emitted in zip(kinds, batch.run(RULES[rule].verify, num_tokens, noise), strict=True):
        if kind.is_enumerable(rule):
            steps += fit(emitted.first, first_law(kind.outcomes(rule, dtype)))
        texts += fit(emitted.text, text_law(kind, num_tokens))
    return steps, texts


def fits_of(rule: str, method: str, shapes: str, turn: int, kernels: Kernels = KERNELS) -> tuple[Fit, Fit]:
    """Return a case's fits: to laws in float32, as served, and as enumerated."""
    kinds, dtype = kinds_of(rule, method, shapes, turn), torch.float64 if turn else torch.float32
    if RULES[rule].max_vocabulary is None:
        num_requests = NUM_REQUESTS // sum(case[:2] == (rule, method) for case in CASES)
        return fits(rule, kinds, dtype, num_requests, kernels=kernels)
    # One token: the laws of later positions would be too many programs.
    return fits(rule, kinds, dtype, NUM_REQUESTS // 2 if shapes == "chains" else 2000, num_tokens=1, kernels=kernels)


IN_THE_GATE = [case for case in CASES if case[0] in FAMILIES and case[-1] == 0]


@pytest.mark.sole("the law of each served rule")
@pytest.mark.parametrize(("rule", "method", "shapes", "turn"), grid(CASES, IN_THE_GATE))
def test_served_rule_has_its_enumerated_law_and_the_target_s(rule: str, method: str, shapes: str, turn: int) -> None:
    for served_fit in fits_of(rule, method, shapes, turn):
        assert served_fit.freedom > 0
        assert served_fit.p_value > ALPHA


def with_layers(rule: str, fanout: tuple[int, ...], world: int, num_blocks: int) -> RequestCase:
    """Requests inside the windows of earlier blocks, which refused what they could."""
    kind = RequestCase(world_of(4, world), fanout)
    for _ in range(num_blocks):

        def left(outcome: RuleOutcome) -> tuple[int, float]:
            return len(outcome.shifts), outcome.probability

        # What a block of no accepted token leaves holds longest.
        model = from_prefix(kind.world, kind.start, kind.length, kind.shifts)
        last = max((o for o in outcomes_of(rule, model, fanout[0]) if not o.accepted), key=left)
        kind = RequestCase(world_of(4, world), fanout, start=(*kind.start, last.next_token), shifts=last.shifts)
    assert len(kind.shifts) == num_blocks
    return kind


def kinds_with_layers(rule: str) -> list[RequestCase]:
    """None, one and two shifts side by side, of chains of two lengths."""
    most = RULES[rule].max_drafts or 3
    return [
        with_layers(rule, (most, 1, 1), 2, 1),
        RequestCase(world_of(4, 6), (min(most, 2), 1)),
        with_layers(rule, (most, 1, 1), 3, 2),
        with_layers(rule, (min(most, 2), 1), 6, 1),
        RequestCase(world_of(4, 1), ()),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rule", grid(["greedy_block", "spectr_gbv"], {"spectr_gbv"}))
def test_pending_layers_change_the_law_of_their_own_requests_only(rule: str) -> None:
    """In the first step, and in later steps as far as they hold."""
    for served_fit in fits(rule, kinds_with_layers(rule)):
        assert served_fit.p_value > ALPHA


def engine_noise(chains: Chains, step: int) -> ChainNoise:
    """Return the engine's noise for seeds and positions; every request has a different seed."""
    request_C = chains.request_C.numpy()
    first = np.concatenate([[True], request_C[1:] != request_C[:-1]])
    chain_C = np.arange(len(request_C))
    rank_C = chain_C - np.maximum.accumulate(np.where(first, chain_C, 0))
    position_C = np.full_like(request_C, 17 + step)
    numbers = torch.from_numpy(draw_numbers(KERNELS, 1000 + request_C, position_C, rank_C, chains.max_length))
    return ChainNoise.of(numbers, chains.max_length)


@pytest.mark.slow
@pytest.mark.parametrize("rule", grid(["bv_race", "traversal", "rrs"], {"bv_race"}))
def test_seeds_give_the_same_law(rule: str) -> None:
    """Numbers by name, as the engine makes them, in place of a generator's."""
    for served_fit in fits(rule, kinds_of(rule, "iid", "chains", 0), noise=engine_noise):
        assert served_fit.p_value > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("rule", grid(["token", "block", "bv_race"], {"block"}))
def test_tiles_decide_as_rows_do(rule: str) -> None:
    """Few requests, because Triton's interpreter is slow.

    All the other tests of this file go through the compiled kernels of their device where
    laws are in float32.
    """
    triton = pytest.importorskip("engine.cuda.kernels")
    kinds = kinds_of(rule, "iid", "chains", 0)

    def emitted(kernels: Kernels) -> list[tuple[list[object], list[object]]]:
        batch = Batch(kinds, 3, seed=2, dtype=torch.float32, kernels=kernels)
        return [(list(one.first), list(one.text)) for one in batch.run(RULES[rule].verify, 1)]

    assert emitted(triton.TritonKernels()) == emitted(TORCH)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_numbers_at_the_ends_accept_nothing_impossible(rule: str, number: float) -> None:
    """Neither 0 nor the last number below 1 emits a token without mass."""
    method = RULES[rule].draft_methods[0]
    kinds = [RequestCase(world_of(5, 7), shape, method) for shape in ((1,), (1, 1), (), (1, 1, 1))]
    kinds += [] if RULES[rule].max_drafts == 1 else [RequestCase(world_of(5, 7), (2, 1), method)]
    assert CORNERS[7] == "disjoint"

    def noise(chains: Chains, _: int) -> ChainNoise:
        each_C = torch.full_like(chains.length_C, number, dtype=torch.float64)
        each_CL = each_C.unsqueeze(1).expand(-1, chains.max_length)
        return ChainNoise(each_CL, each_C, each_C, each_CL, each_C)

    for kind, emitted in zip(kinds, Batch(kinds, 20, 4, torch.float32).run(RULES[rule].verify, 1, noise), strict=True):
        for accepted, token in emitted.first:
            assert accepted == ()
            assert kind.world.target[()][token] > 0


def test_a_batch_in_which_nothing_is_drafted() -> None:
    """The race verifies such rows, and no other rule sees them (`verify._rule_of`)."""
    for served_fit in fits(
        "bv_race", [RequestCase(world_of(5, 0), ()), RequestCase(world_of(5, 1), ())], num_requests=4000, num_tokens=2
    ):
        assert served_fit.p_value > ALPHA


LOSSY: dict[str, Verify] = {residual: OverAcceptance(0.1, residual) for residual in ("optimal", "target")}


@pytest.mark.sampled
@pytest.mark.parametrize("rule", [*RULES, *LOSSY])
def test_tensors_are_made_where_the_laws_are(rule: str) -> None:
    """Tensors on the default device are without content here, and do not mix with other tensors."""
    like = rule if rule in RULES else "token"
    for shapes in ("chains", "trees") if takes_trees(like) else ("chains",):
        batch = Batch(kinds_of(like, RULES[like].draft_methods[0], shapes, 0), 3, 1, torch.float32)
        chains, target = batch.drafted(torch.arange(len(batch.kind_B)))
        noise = batch.noise(chains)
        with torch.device("meta"):
            verdict = (LOSSY.get(rule) or RULES[rule].verify)(chains, target, noise)
        for part in (verdict.chain_B, verdict.accepted_B, verdict.next_token_B):
            assert part.device == target.probs_NV.device


def test_a_chain_rule_is_what_its_node_rule_makes_it() -> None:
    """Made again: the rules in RULES were made when the module was imported."""
    batch = Batch(kinds_of("rrs", "iid", "trees", 0), 50, 1, torch.float32)
    chains, target = batch.drafted(torch.arange(len(batch.kind_B)))
    noise = batch.noise(chains)
    verdict, again = (verify(chains, target, noise) for verify in (RULES["rrs"].verify, TopDown(rrs)))
    assert torch.equal(verdict.next_token_B, again.next_token_B)


def test_a_chain_that_has_ended_leads_itself() -> None:
    """The zeros that stand beyond its end are no tokens, on either side of a comparison."""
    tokens = torch.tensor([[[1, 0, 0], [1, 0, 0], [1, 0, 2]]])
    assert leaders(tokens, torch.tensor([[1, 3, 3]])).tolist() == [[[0, 0, 0], [0, 1, 1], [0, 1, 2]]]
    assert leaders(tokens, torch.tensor([[3, 1, 2]])).tolist() == [[[0, 0, 0], [0, 1, 1], [0, 0, 2]]]
