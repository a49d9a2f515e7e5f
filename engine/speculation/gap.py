"""How far a rule stays below the optimum at one position, on laws that were met while serving.

The gap is alpha* of the draft method minus the rule's own acceptance: the acceptance in closed form where there is
one (then the gap is never negative), else given the tokens that were drafted (right on average over drafts).
Not for: deciding anything; it is reported (`spec_optimal_acceptance_gap`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.speculation import theory
from engine.speculation.theory import Law
from engine.speculation.verification.node import NodeRule
from engine.speculation.verification.nss import nss
from engine.speculation.verification.rrs import rrs_without_replacement

# The optimum without replacement is a quadrature per token: above this (vocabulary x drafts) it would stall a step.
_MOST_QUADRATURES = 20_000

# Rules whose acceptance has no closed form, or none for this way of drafting.
_GIVEN_DRAFTS: dict[str, NodeRule] = {
    "nss": nss,
    "rrs_without_replacement": rrs_without_replacement,
    "traversal": rrs_without_replacement,
}


def acceptance_gap(rule: str, method: str, p: Law, q: Law, drafted: Sequence[int]) -> float | None:
    """alpha* minus the rule's acceptance at a node with these drafts; None where it would take too long."""
    optimum = _optimum(method if len(drafted) > 1 else "iid", p, q, len(drafted))
    if optimum is None:
        return None
    if rule in _GIVEN_DRAFTS and not (rule == "nss" and method == "iid"):
        return optimum - _acceptance_given(_GIVEN_DRAFTS[rule], p, q, drafted)
    return optimum - theory.ACCEPTANCE[rule](p, q, len(drafted))


def _optimum(method: str, p: Law, q: Law, count: int) -> float | None:
    if method == "iid":
        return theory.alpha_star_iid(p, q, count)
    if method == "without_replacement":
        affordable = len(p) * count <= _MOST_QUADRATURES
        return theory.alpha_star_without_replacement(p, q, count) if affordable else None
    return theory.alpha_star_greedy(p, q, count)


def _acceptance_given(rule: NodeRule, p: Law, q: Law, drafted: Sequence[int]) -> float:
    """P(the emitted token is a draft | the drafts)."""
    tokens = torch.tensor([list(drafted)])
    law = rule(torch.from_numpy(p[None]), torch.from_numpy(q[None]), tokens, torch.ones_like(tokens, dtype=torch.bool))
    return float(law[0, list(set(drafted))].sum())
