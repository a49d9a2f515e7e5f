"""Distance of a rule's acceptance from the optimum at one position.

The gap is alpha* of the draft method minus the rule's own acceptance. The acceptance is computed in
closed form if there is one (then the gap is never negative), else given the drafted tokens
(unbiased over drafts). The gap decides nothing; it is reported (`spec_optimal_acceptance_gap`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.speculation import theory
from engine.speculation.rule_facts import MOST_LIKELY
from engine.speculation.theory import Law
from engine.speculation.verification import RULES
from engine.speculation.verification.rule import NodeRule

# The optimum without replacement is a quadrature per token; above this size (vocabulary x drafts)
# it would stall a step.
_MOST_QUADRATURES = 20_000
# Of larger vocabularies only the likeliest tokens are used: sorting all of 152,000 takes 25 ms,
# sorting these 2 ms.
MOST_TOKENS = 16_384


def likeliest(p_V: Tensor, q_V: Tensor, tokens_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both laws over their likeliest and drafted tokens, and the drafted indices.

    Each has sum 1. The other tokens' mass bounds the error of the gap.
    """
    if len(p_V) > MOST_TOKENS:
        order_V = (p_V + q_V).scatter(0, tokens_K, torch.inf)
        kept = order_V.topk(MOST_TOKENS).indices.sort().values
        p_V, q_V, tokens_K = p_V[kept], q_V[kept], torch.searchsorted(kept, tokens_K)
    return p_V / p_V.sum(), q_V / q_V.sum(), tokens_K


def acceptance_gap(rule: str, method: str, p: Law, q: Law, drafted: Sequence[int]) -> float | None:
    """Return alpha* minus the rule's acceptance at a node; None if it takes too long."""
    best = optimum(method, p, q, len(drafted), _MOST_QUADRATURES)
    return None if best is None else best - acceptance(rule, method, p, q, drafted)


def optimum(method: str, p: Law, q: Law, count: int, most_quadratures: int) -> float | None:
    """Return alpha* of `count` drafts, within 1e-6; None beyond the quadratures."""
    if method == MOST_LIKELY:
        return float(p[theory.top_tokens(q, count)].sum())
    if method == "iid" or count == 1:
        return theory.alpha_star_iid(p, q, count)
    if method == "without_replacement":
        q = _without_tail(q)
        affordable = np.count_nonzero(q) * count <= most_quadratures
        return theory.alpha_star_without_replacement(p, q, count) if affordable else None
    return theory.alpha_star_greedy(p, q, count)


def _without_tail(q: Law) -> Law:
    """Return q without its tail of mass 1e-7, which bounds the change per draft."""
    order = np.argsort(q)
    dropped = order[np.cumsum(q[order]) < 1e-7]
    shortened = q.copy()
    shortened[dropped] = 0.0
    tailless: Law = shortened / shortened.sum()
    return tailless


def acceptance(rule: str, method: str, p: Law, q: Law, drafted: Sequence[int]) -> float:
    """Return the rule's acceptance at one position: in closed form, else given these drafts."""
    known, count = RULES[rule], len(drafted)
    if not known.has_closed_form(method, count):
        assert known.node_rule is not None, rule
        return _acceptance_given(known.node_rule, p, q, drafted)
    closed_form = known.acceptance_of_one if count == 1 else known.acceptance
    assert closed_form is not None
    return closed_form(p, q, count)


def _acceptance_given(rule: NodeRule, p: Law, q: Law, drafted: Sequence[int]) -> float:
    """Return P(the emitted token is a draft | the drafts)."""
    tokens = torch.tensor([list(drafted)])
    law = rule(torch.from_numpy(p[None]), torch.from_numpy(q[None]), tokens, torch.ones_like(tokens, dtype=torch.bool))
    return float(law[0, list(set(drafted))].sum())
