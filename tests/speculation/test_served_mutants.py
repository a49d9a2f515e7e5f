"""Nearly right rules, patched into the code that serves, are rejected."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import torch_block
from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.speculation.verification import RULES
from engine.speculation.verification.greedy import greedy, spechub
from engine.speculation.verification.rrs import rrs
from tests.grid import FAMILIES, grid
from tests.speculation.served import KERNELS, Batch, Fit, RequestCase
from tests.speculation.test_served_rules import ALPHA, fits, fits_of, kinds_with_layers, world_of
from tests.wrong import instead

Patch = AbstractContextManager[Any]

# Modules by name: the package has rules of the same names.
greedy_block, kseq, ot_lp, traversal, weighted_race = (
    import_module(f"engine.speculation.verification.{name}")
    for name in ("greedy_block", "kseq", "ot_lp", "traversal", "weighted_race")
)


def verifying(wrong: Callable[[Chains, ProbsTable, ChainNoise], ChainVerdict]) -> Patch:
    """Another function in the rule's place."""
    return instead(Batch, "run", lambda run, batch, _, *rest: run(batch, wrong, *rest))


def at_nodes(rule: str, node_rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Patch:
    """Another law of the emitted token."""
    return instead(RULES[rule].verify, "node_rule", lambda _, *operands: node_rule(*operands))


def other_noise(rule: str, change: Callable[[ChainNoise], ChainNoise]) -> Patch:
    """Numbers that decide about something else, too."""
    verify = RULES[rule].verify
    return verifying(lambda chains, target, noise: verify(chains, target, change(noise)))


def weights_of_one() -> Patch:
    """`stop_chains` draws from (p - q)+ where (w p - q)+ is right."""
    return instead(
        TORCH,
        "draw_residual",
        lambda right, chains, target, n, weight, u: right(chains, target, n, torch.ones_like(weight), u),
    )


def score_from_acceptance() -> Patch:
    """The acceptance number of the first token is used as the race's score."""

    def reused(noise: ChainNoise) -> ChainNoise:
        return replace(noise, score_C=noise.accept_CL[:, 0] if noise.accept_CL.shape[1] else noise.score_C)

    return other_noise("bv_race", reused)


def no_lower_end() -> Patch:
    """The race's score goes down to 0 wherever a chain stops."""

    def bounds(right: Any, *parts: Any) -> tuple[Tensor, Tensor]:
        lower_C, upper_C = right(*parts)
        return torch.zeros_like(lower_C), upper_C

    return instead(torch_block, "score_bounds", bounds)


def residual_is_the_target() -> Patch:
    """Token verification draws a refused token again from p."""

    def drawn(
        _right: Any, _: Chains, target: ProbsTable, accepted_C: Tensor, _weight: Tensor, uniform_C: Tensor
    ) -> Tensor:
        return categorical(target.rows(accepted_C), uniform_C)

    return instead(TORCH, "draw_residual", drawn)


def skipped_duplicates() -> Patch:
    """Recursive rejection that does not test a token again."""

    def skipping(target: Tensor, draft: Tensor, drafted: Tensor, present: Tensor) -> Tensor:
        seen = [(drafted[:, :k] == drafted[:, k : k + 1]).any(1) for k in range(drafted.shape[1])]
        return rrs(target, draft, drafted, present & ~torch.stack(seen, 1))

    return at_nodes("rrs", skipping)


def last_draft_only() -> Patch:
    """Greedy drafts of which the drawn one is judged by q, as if it had been drawn alone."""

    def alone(target: Tensor, draft: Tensor, drafted: Tensor, present: Tensor) -> Tensor:
        place = torch.arange(drafted.shape[1])
        return greedy(target, draft, drafted, present & (place == (present.sum(1, keepdim=True) - 1)))

    return at_nodes("greedy", alone)


def pairs_as_they_are_drawn() -> Patch:
    """SpecHub that takes (x, a) for (a, x): x for the most likely token, a for the drawn one."""
    return at_nodes("spechub", greedy)


def other_hub() -> Patch:
    """SpecHub whose verification takes the last of equally likely tokens for the hub."""

    def last(target: Tensor, draft: Tensor, drafted: Tensor, present: Tensor) -> Tensor:
        return spechub(target.flip(1), draft.flip(1), draft.shape[1] - 1 - drafted, present).flip(1)

    return at_nodes("spechub", last)


def no_threshold() -> Patch:
    """The winner of the weighted race is accepted wherever its key lies."""

    def weights(right: Any, *parts: Any) -> tuple[Tensor, Tensor]:
        weight_NK, floor_N1 = right(*parts)
        return weight_NK, torch.zeros_like(floor_N1)

    return instead(weighted_race, "_weights", weights)


def sets_as_if_ordered() -> Patch:
    """The linear program's P(D) without the draws that repeat a token of D."""

    def plan(right: Any, target: tuple[float, ...], draft: tuple[float, ...], count: int) -> Any:
        sets, mass = right(target, draft, count)
        return {tokens: p if len(tokens) == count else 1.2 * p for tokens, p in sets.items()}, mass

    return instead(ot_lp, "transport_plan", plan)


def forgotten_layers(rule: str) -> Patch:
    """The next step takes the target's law as it was before the block."""
    verify = RULES[rule].verify
    return verifying(lambda *parts: replace(verify(*parts), shifts=None))


def published_acceptance() -> Patch:
    """The race's winner is judged as a chain that was drawn alone."""

    def alone(right: Any, chains: Chains) -> tuple[Tensor, Tensor]:
        chain_BK, exists_BK = right(chains)
        return chain_BK, exists_BK[:, :1]

    return instead(greedy_block, "chain_table", alone)


def draft_mass_stays() -> Patch:
    """Traversal that leaves a deleted child's mass in its parent's draft law."""

    def delete(right: Any, p_BXV: Tensor, q_BXV: Tensor, *rest: Any) -> None:
        before = q_BXV.clone()
        right(p_BXV, q_BXV, *rest)
        q_BXV.copy_(before)

    return instead(traversal, "_delete", delete)


MUTANTS: list[tuple[str, str, str, Callable[[], Patch]]] = [
    ("block", "iid", "chains", weights_of_one),
    ("bv_race", "iid", "chains", weights_of_one),
    ("bv_race", "iid", "chains", score_from_acceptance),
    ("bv_race", "iid", "chains", no_lower_end),
    ("block", "iid", "chains", lambda: instead(torch_block, "_accept", lambda *parts: parts[-1])),
    ("token", "iid", "chains", residual_is_the_target),
    ("nss", "iid", "chains", lambda: at_nodes("nss", lambda target, draft, *_: draft)),
    ("nss", "greedy", "trees", lambda: at_nodes("nss", lambda target, draft, *_: draft)),
    ("rrs", "iid", "generic", skipped_duplicates),
    ("rrs_without_replacement", "without_replacement", "generic", lambda: at_nodes("rrs_without_replacement", rrs)),
    ("kseq", "iid", "chains", lambda: instead(kseq, "solve_rho", lambda *parts: torch.ones_like(parts[-1]))),
    ("spechub", "spechub", "chains", pairs_as_they_are_drawn),
    ("spechub", "spechub", "trees", other_hub),
    ("spechub", "spechub", "trees", pairs_as_they_are_drawn),
    ("greedy", "greedy", "chains", last_draft_only),
    ("greedy", "greedy", "trees", last_draft_only),
    ("weighted_race", "iid", "chains", no_threshold),
    ("ot_lp", "iid", "chains", sets_as_if_ordered),
    ("greedy_block", "iid", "chains", lambda: forgotten_layers("greedy_block")),
    ("spectr_gbv", "iid", "chains", lambda: forgotten_layers("spectr_gbv")),
    ("spectr_gbv", "iid", "chains", published_acceptance),
    ("traversal", "without_replacement", "chains", draft_mass_stays),
    ("traversal", "iid", "trees", draft_mass_stays),
]


GENERIC = ((0, (4,)), (3, (3, 1)), (6, (3,)), (0, (2, 2)))
"""Worlds and shapes with many duplicates and several refusals."""


def fits_under(rule: str, method: str, shapes: str, kernels: Kernels = KERNELS) -> tuple[Fit, Fit]:
    """Check a rule as in the gate, or with generic laws only."""
    if shapes != "generic":
        return fits_of(rule, method, shapes, 0, kernels)
    cases = [RequestCase(world_of(4, world), fanout, method) for world, fanout in GENERIC]
    return fits(rule, cases, num_requests=60_000, kernels=kernels)


@pytest.mark.sole("a wrong variant of each served rule")
@pytest.mark.parametrize(
    ("rule", "method", "shapes", "wrong"), grid(MUTANTS, [mutant for mutant in MUTANTS if mutant[0] in FAMILIES])
)
def test_wrong_rules_are_rejected(rule: str, method: str, shapes: str, wrong: Callable[[], Patch]) -> None:
    """Wrong variants of the plain operations; kernels have other ones."""
    with wrong():
        assert min(found.p_value for found in fits_under(rule, method, shapes, TORCH)) < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "method"), sorted({(rule, method) for rule, method, shapes, _ in MUTANTS if shapes == "generic"})
)
def test_the_right_rules_are_not(rule: str, method: str) -> None:
    assert min(found.p_value for found in fits_under(rule, method, "generic")) > ALPHA


def test_every_rule_has_a_wrong_variant() -> None:
    assert {rule for rule, *_ in MUTANTS} == set(RULES)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["accept_CL", "residual_C", "score_C"])
def test_numbers_that_chose_the_chain_must_not_decide_about_it(number: str) -> None:
    def reused(noise: ChainNoise) -> ChainNoise:
        if number == "accept_CL":
            return replace(noise, chosen_accept_CL=noise.accept_CL)
        return replace(noise, chosen_residual_C=getattr(noise, number))

    kinds = [RequestCase(world_of(5, world), fanout) for world, fanout in ((0, (4, 1)), (3, (3, 1)), (6, (4, 1)))]
    with other_noise("spectr_gbv", reused):
        assert min(found.p_value for found in fits("spectr_gbv", kinds)) < ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["greedy_block", "spectr_gbv"])
def test_older_layers_must_not_be_forgotten(rule: str) -> None:
    """The wrong variant forgets an older window that goes on."""
    with instead(greedy_block, "shifts_after", lambda right, *parts: right(*parts[:2], None, *parts[3:])):
        assert min(found.p_value for found in fits(rule, kinds_with_layers(rule))) < ALPHA
