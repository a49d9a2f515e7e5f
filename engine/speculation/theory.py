"""Optima, acceptances and rejections of a pair of laws (float64, numpy).

Notation (as in `docs/speculation.md`): p target law, q draft law, n drafts at one position, TV(p,
q) = 1 - sum min(p, q). The optimum alpha* of a draft law is the largest probability with which any
lossless rule can emit a draft: alpha* = min over sets H of p(H) + 1 - Q(H), Q(H) = P(all drafts in
H). (Hu et al., ICLR 2025, for sampling with and without replacement and greedy drafts.)

Not for: running anything (`verification`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Law = npt.NDArray[np.float64]


def _ratio_order(p: Law, q: Law) -> npt.NDArray[np.int64]:
    """Sort tokens by q/p, descending; tokens that are never drafted come last."""
    ratio = np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0)
    return np.argsort(ratio, kind="stable")


def alpha_star_iid(p: Law, q: Law, n: int) -> float:
    """Return the optimum for n i.i.d. drafts, O(V log V).

    H runs over prefixes of the tokens by q/p; Q(H) = q(H)^n.
    """
    order = _ratio_order(p, q)
    mass_p, mass_q = (np.concatenate([[0.0], np.cumsum(law[order])]) for law in (p, q))
    return float(np.min(1 + mass_p - mass_q.clip(max=1.0) ** n))


def alpha_star_without_replacement(p: Law, q: Law, n: int) -> float:
    """Return the optimum for n drafts without replacement.

    The same prefixes, Q by quadrature.
    """
    order = _ratio_order(p, q)
    mass_p = np.concatenate([[0.0], np.cumsum(p[order])])
    return float(np.min(1 + mass_p - all_drafts_within(q[order], n)))


def all_drafts_within(q: Law, n: int) -> Law:
    """Return [V + 1] the probability that n draws without replacement lie in i tokens.

    Exponential race: token x arrives at E_x / q_x. With lam = 1 - q(H), Q(H) = int lam exp(-lam t)
    P(at least n tokens of H have arrived by t) dt, by the trapezoid rule in log t (exponentially
    convergent); the count's law below n is carried from prefix to prefix. O(V n nodes).
    """
    step = 0.2
    time = np.exp(np.arange(-40.0, 42.0, step))
    below = np.zeros((n, len(time)))
    below[0] = 1.0
    result = np.zeros(len(q) + 1)
    total, mass, support = float(q.sum()), 0.0, 0
    for i, weight in enumerate(q, start=1):
        if weight > 0:
            absent = np.exp(-weight * time)
            shifted = np.vstack([np.zeros((1, len(time))), below[:-1]])
            below = below * absent + shifted * (1 - absent)
            mass, support = mass + weight, support + 1
        elif i > 1:
            result[i] = result[i - 1]
            continue
        rate = max(total - mass, 0.0)
        if rate <= 1e-14:
            result[i] = 1.0
        elif support >= n:
            arrived = (1 - below.sum(0)).clip(min=0)
            result[i] = step * float((rate * time * np.exp(-rate * time) * arrived).sum())
    return result


def top_tokens(q: Law, count: int) -> npt.NDArray[np.int64]:
    """Return the `count` most likely tokens; ties go to the smaller id."""
    order: npt.NDArray[np.int64] = np.lexsort((np.arange(len(q)), -q))
    return order[:count]


def alpha_star_greedy(p: Law, q: Law, n: int) -> float:
    """Return the optimum for greedy drafts (n - 1 most likely, one drawn), O(V log V)."""
    top = top_tokens(q, n - 1)
    rest = q.copy()
    rest[top] = 0.0
    if rest.sum() > 0:
        rest /= rest.sum()
    outside = np.ones(len(p), dtype=bool)
    outside[top] = False
    return float(p[top].sum() + np.minimum(p, rest)[outside].sum())


def accept_token(p: Law, q: Law, n: int) -> float:
    """Return the acceptance of single-draft verification: 1 - TV(p, q) for any n."""
    del n
    return float(np.minimum(p, q).sum())


def accept_nss(p: Law, q: Law, n: int) -> float:
    """Return the acceptance of naive sampling over n i.i.d. drafts."""
    return float((p * (1 - (1 - q) ** n)).sum())


def accept_rrs(p: Law, q: Law, n: int) -> float:
    """Return the acceptance of recursive rejection sampling with replacement."""
    scale = 1.0
    for _ in range(n - 1):
        scale += 1 - np.minimum(p, scale * q).sum()
    return float(np.minimum(p, scale * q).sum())


def accept_score_race(p: Law, q: Law, n: int) -> float:
    """Return the acceptance of the score race at one position."""
    return float(_raced(p, q, n).sum())


def _raced(p: Law, q: Law, n: int) -> Law:
    """Return [V] the mass of each token that the score race of n chains accepts."""
    ratio = np.divide(q, p, out=np.zeros_like(p), where=p > 0).clip(max=1.0)
    mass: Law = p * (1 - (1 - ratio) ** n)
    return mass


def accept_selected_block(p: Law, q: Law, n: int) -> float:
    """Return the acceptance of a block of one token after the score race."""
    kept = _raced(p, q, n)
    excess = (q - p).clip(min=0)
    share = excess / excess.sum() if excess.sum() > 1e-15 else excess
    return float(np.minimum(p, kept + share * max(0.0, 1 - kept.sum())).sum())
