"""Quantities of whole blocks, and of lossy rules: lengths, bounds, rejections.

They need no sampling. float64, numpy.

Notation as in `engine.speculation.theory`, which covers a single position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from engine.speculation.theory import Law, accept_token, alpha_star_iid

Laws = Callable[[tuple[int, ...]], tuple[Law, Law]]
"""(p, q) below a prefix."""
Verification = Literal["token", "block", "greedy"]
"""Bound of a single chain's acceptance; see `expected_block_length`."""


def expected_block_length(
    log_target_BL: Law, log_draft_BL: Law, num_drafts: int, verification: Verification = "block"
) -> Law:
    """[B] expected accepted length along sampled target paths: sum_i 1 - (1 - u_i)^K.

    U_i is a share of the paths.

    The arguments are log p and log q of the path's tokens; the mean over paths drawn from the
    target is E[tau]. With the ratios r_i = q_i / p_i and R_i = r_1 ... r_i, u_i is, by
    `verification`: `token`, prod_j min(1, r_j): a single chain only; `block`, min(1, R_1, ...,
    R_i): block verification, and the score race for K > 1; `greedy`, min(1, R_i): greedy block
    verification, and for K > 1 the selection of SpecTr-GBV, a lower bound of `spectr_gbv`. Greedy
    rules reach this in the block that begins a text; later blocks have another target.
    """
    log_ratio = log_draft_BL - log_target_BL
    if verification == "block":
        accepted_BL = race_acceptance(np.exp(log_ratio), (num_drafts, *(1,) * (log_ratio.shape[1] - 1)))
    else:
        log_ratio = np.minimum(log_ratio, 0.0) if verification == "token" else log_ratio
        log_kept = np.minimum(np.cumsum(log_ratio, axis=1), 0.0)
        accepted_BL = 1 - (1 - np.exp(log_kept)) ** num_drafts
    length: Law = accepted_BL.sum(axis=1)
    return length


def race_acceptance(ratio_BL: Law, fanout: Sequence[int]) -> Law:
    """Return [B, L] the probability that the score race accepts the first 1, ..., L tokens.

    Of target paths.

    ratio_BL: q/p of each token of the path, 0 where none is drafted. fanout: independent children
    of every node by depth. A node's race is won below t with probability F(t) = 1 - (1 - t)^n if
    its n children have scores below t with probability t. So the first i tokens are accepted with
    probability F_1(min(1, r_1 F_2(min(1, r_2 ...)))), as `docs/speculation-rules.md` proves.
    """
    accepted = np.zeros_like(ratio_BL)
    for length in range(1, len(fanout) + 1):
        share = np.ones(len(ratio_BL))
        for depth in reversed(range(length)):
            share = 1 - (1 - np.minimum(1.0, ratio_BL[:, depth] * share)) ** fanout[depth]
        accepted[:, length - 1] = share
    return accepted


def _levels(laws: Laws, vocabulary: int, length: int) -> Iterator[Law]:
    """Return [N, 2] by depth: joint probabilities of every block of that length.

    Under the target and under the draft model.
    """
    joint: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 1.0)}
    for _ in range(length):
        below: dict[tuple[int, ...], tuple[float, float]] = {}
        for prefix, (p_mass, q_mass) in joint.items():
            p, q = laws(prefix)
            for token in range(vocabulary):
                below[*prefix, token] = p_mass * float(p[token]), q_mass * float(q[token])
        joint = below
        yield np.array(list(joint.values()))


def block_length_bound(laws: Laws, vocabulary: int, length: int, num_drafts: int) -> float:
    """Return an upper bound of the expected accepted length of K i.i.d.

    chains: the sum over i of alpha* of blocks of i tokens.

    No rule can accept more of the first i tokens than an optimal one for i-token blocks; for K > 1
    the sum is not attainable in general. Enumerates all blocks: small vocabularies.
    """
    return sum(alpha_star_iid(level[:, 0], level[:, 1], num_drafts) for level in _levels(laws, vocabulary, length))


def selected_block_bound(laws: Laws, vocabulary: int, length: int, num_drafts: int) -> float:
    """Return SpecTr-GBV's expected accepted length.

    `spectr_gbv` reaches at least this for a first block.

    sum_v P_v (1 - (1 - min(1, Q_v/P_v))^K), by enumeration of all blocks.
    """
    total = 0.0
    for level in _levels(laws, vocabulary, length):
        p, q = level[level[:, 0] > 0].T
        total += float((p * (1 - (1 - np.minimum(1.0, q / p)) ** num_drafts)).sum())
    return total


def over_acceptance(p: Law, q: Law, epsilon: float) -> Law:
    """Return the acceptance b(x) = min(1, (p + epsilon)/q) (Yin et al.

    2024, section on the rejection-bias trade-off).
    """
    accept: Law = np.minimum(1.0, np.divide(p + epsilon, q, out=np.ones_like(p), where=q > 0))
    return accept


def smallest_bias(p: Law, q: Law, accept: Law) -> float:
    """Return the least TV from p of any residual, with acceptance `accept` (Theorem 4)."""
    return float((accept * q - p).clip(min=0).sum())


def pareto_bias(p: Law, q: Law, rejection: float) -> float:
    """Return the least TV from p at a given rejection probability (Theorem 5).

    It is max(0, TV(p, q) - rejection).
    """
    return max(0.0, 1 - accept_token(p, q, 1) - rejection)


def expected_rejections(
    laws: Laws, horizon: int, batch: int = 1, merged: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple
) -> float:
    """Return the expected rejections over `horizon` tokens (Yin et al., Theorems 1 and 3).

    Drafts reach to the horizon, and there is no bonus token.

    batch: M chains, of which the first position after a rejection tries all by recursive rejection,
    and the rest goes on with the accepted one. With M = 1: sum_n E_{x~p} TV(p_n, q_n). For M > 1,
    with f(x_{1:n}) the probability of x_{1:n} with its last token drawn again after a rejection (f
    of nothing is 1) and p^1 = p, p^{m+1} = norm (p^m - q)+: sum_n E_{x~p} TV - sum_n E_{x~f} [TV -
    prod_m TV(p^m, q)]. Enumerates all prefixes: small vocabularies. merged: one name for all
    prefixes with the same laws from there on, such as the last state of a Markov chain; it is given
    such a name with one more token.
    """
    redrawn: dict[tuple[int, ...], float] = {(): 1.0}
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    total = 0.0
    for _ in range(horizon):
        next_redrawn: dict[tuple[int, ...], float] = {}
        next_reached: dict[tuple[int, ...], float] = {}
        for prefix, probability in reached.items():
            p, q = laws(prefix)
            first, fresh = 1 - accept_token(p, q, 1), redrawn.get(prefix, 0.0)
            residual, all_rejected = p, 1.0
            for _ in range(batch):
                rejected = max(0.0, 1 - accept_token(residual, q, 1))
                all_rejected *= rejected
                if rejected > 1e-15:
                    residual = (residual - q).clip(min=0)
                    residual = residual / residual.sum()
            total += probability * first - fresh * (first - all_rejected)
            for token in np.flatnonzero(p > 0).tolist():
                again = fresh * all_rejected * residual[token]
                again += (probability - fresh) * max(0.0, p[token] - q[token])
                name = merged((*prefix, token))
                next_reached[name] = next_reached.get(name, 0.0) + probability * p[token]
                next_redrawn[name] = next_redrawn.get(name, 0.0) + again
        redrawn, reached = next_redrawn, next_reached
    return total


def decoding_law(p: Law, q: Law, accept: Law, residual: str = "optimal") -> Law:
    """Return the law of the emitted token with acceptance `accept`.

    Decoding-OPT and -UNO.

    residual: `optimal`, norm (p - accept q)+ (Theorem 4), or `target`, p itself.
    """
    mass = accept * q
    left = 1 - mass.sum()
    if left <= 1e-15:
        return mass
    again = p
    if residual == "optimal":
        again = (p - mass).clip(min=0)
        again = again / again.sum() if again.sum() > 0 else p
    law: Law = mass + left * again
    return law


def pareto_front(p: Law, q: Law, epsilons: Sequence[float]) -> list[tuple[float, float]]:
    """Return (rejection probability, least bias) of over-acceptance by each epsilon.

    All on Theorem 5's line.
    """
    points = []
    for epsilon in epsilons:
        accept = over_acceptance(p, q, epsilon)
        points.append((1 - float((accept * q).sum()), smallest_bias(p, q, accept)))
    return points
