"""Exact laws of the chain rules by enumeration: every drafted path, every outcome, no sampling.

Built on the quantities the rules themselves compute (acceptance, residual, score interval), so
that a mistake in them shows as a wrong law.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.speculation.drafting import Chains, LawTable
from engine.speculation.verification.block import blocks
from engine.speculation.verification.race import score_bounds
from engine.speculation.verification.rule import residual
from engine.speculation.verification.token import token_acceptance

Path = tuple[int, ...]
Law = dict[Path, float]
Rows = Mapping[Path, Sequence[float]]


@dataclass(frozen=True)
class Outcome:
    """One way a chain can end: what is accepted, the token after it, and how likely that is."""

    accepted: Path
    next_token: int
    probability: float
    lower: float = 0.0
    upper: float = 1.0
    path: Path = ()
    """The whole drafted chain."""


@dataclass(frozen=True)
class Model:
    """Target and draft laws of every prefix up to the draft length."""

    target: Rows
    draft: Rows
    vocabulary: int
    length: int


def all_paths(model: Model, length: int) -> list[Path]:
    """Every path of `length` tokens."""
    return list(itertools.product(range(model.vocabulary), repeat=length))


def joint(rows: Rows, path: Path) -> float:
    """Probability of a path."""
    return float(np.prod([rows[path[:i]][token] for i, token in enumerate(path)]))


def every_chain(model: Model) -> tuple[Chains, LawTable, list[Path]]:
    """All drafted paths as chains of as many requests."""
    paths = all_paths(model, model.length)
    prefixes = [prefix for length in range(model.length + 1) for prefix in all_paths(model, length)]
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    node = torch.tensor([[number[path[:i]] for i in range(model.length + 1)] for path in paths])
    inner = [prefix for prefix in prefixes if len(prefix) < model.length]
    draft_NV = torch.tensor([list(model.draft[prefix]) for prefix in inner], dtype=torch.float64)
    target_NV = torch.tensor([list(model.target[prefix]) for prefix in prefixes], dtype=torch.float64)
    order = torch.arange(len(paths))
    chains = Chains(
        torch.tensor(paths).reshape(len(paths), model.length),
        torch.full((len(paths),), model.length),
        order,
        torch.zeros_like(order),
        LawTable(draft_NV, node[:, : model.length]),
    )
    return chains, LawTable(target_NV, node), paths


def block_outcomes(model: Model, weights: Callable[[Tensor], Tensor] | None = None) -> list[Outcome]:
    """Block verification of one chain, with the score interval of every outcome.

    `weights` replaces the weights the residual is made with (for wrong variants).
    """
    chains, target, paths = every_chain(model)
    known = blocks(chains, target)
    stop = _last_success(known.accept_CL)
    residual_weights = known.weight_CL1 if weights is None else weights(known.weight_CL1)
    outcomes = []
    for tau in range(model.length + 1):
        tau_C = torch.full_like(chains.length_C, tau)
        law = _normalised(residual(chains, target, tau_C, residual_weights[:, tau]))
        for token in range(model.vocabulary):
            lower, upper = score_bounds(chains, target, known, tau_C, torch.full_like(tau_C, token))
            for i, path in enumerate(paths):
                drafted = joint(model.draft, path)
                if drafted > 0 and (probability := drafted * float(stop[i, tau] * law[i, token])) > 0:
                    outcomes.append(Outcome(path[:tau], token, probability, float(lower[i]), float(upper[i]), path))
    return outcomes


def token_outcomes(model: Model) -> list[Outcome]:
    """Token verification of one chain."""
    chains, target, paths = every_chain(model)
    accept = token_acceptance(chains, target)
    reached = torch.cat([torch.ones_like(accept[:, :1]), accept.cumprod(-1)], 1)
    stop = reached - torch.cat([reached[:, 1:], torch.zeros_like(accept[:, :1])], 1)
    outcomes = []
    for tau in range(model.length + 1):
        tau_C = torch.full_like(chains.length_C, tau)
        law = _normalised(residual(chains, target, tau_C, torch.ones(len(paths), dtype=torch.float64)))
        for i, path in enumerate(paths):
            if (drafted := joint(model.draft, path)) == 0:
                continue
            for token in range(model.vocabulary):
                outcomes.append(Outcome(path[:tau], token, drafted * float(stop[i, tau] * law[i, token])))
    return outcomes


def race(outcomes_by_chain: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """The winner's outcomes when independent chains race for the smallest score.

    The other chains' scores have piecewise linear distribution functions, so the integrand is a
    polynomial between breakpoints and Gauss-Legendre quadrature is exact.
    """
    bounds = {0.0, 1.0}
    for outcomes in outcomes_by_chain:
        for outcome in outcomes:
            bounds |= {outcome.lower, outcome.upper}
    points = np.array(sorted(bounds))
    nodes, weights = np.polynomial.legendre.leggauss(len(outcomes_by_chain) + 1)
    widths = np.diff(points)
    at = points[:-1, None] + (nodes + 1) / 2 * widths[:, None]
    survival = [1 - _distribution(outcomes, at) for outcomes in outcomes_by_chain]
    winners = []
    for k, outcomes in enumerate(outcomes_by_chain):
        others = np.prod([survival[j] for j in range(len(survival)) if j != k], axis=0) * np.ones_like(at)
        integral = np.concatenate([[0.0], np.cumsum((others * weights).sum(1) / 2 * widths)])
        for o in outcomes:
            span = o.upper - o.lower
            first, last = np.searchsorted(points, [o.lower, o.upper])
            share = (integral[last] - integral[first]) / span if span > 0 else 1.0
            winners.append(Outcome(o.accepted, o.next_token, o.probability * float(share), o.lower, o.upper))
    return winners


def redrawn(outcomes: Sequence[Outcome], verified: Rows, model: Model) -> list[Outcome]:
    """The outcomes when chains are drawn from `model.draft` but were verified as drawn from `verified`."""
    return [
        replace(o, probability=o.probability * joint(model.draft, o.path) / joint(verified, o.path)) for o in outcomes
    ]


def _distribution(outcomes: Sequence[Outcome], at: np.ndarray) -> np.ndarray:
    total = np.zeros_like(at)
    for o in outcomes:
        span = o.upper - o.lower
        inside = (at - o.lower) / span if span > 0 else (at >= o.upper).astype(float)
        total += o.probability * np.clip(inside, 0, 1)
    return total


def first_block_law(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Probability of each "accepted|next"."""
    law: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        law[",".join(map(str, outcome.accepted)) + f"|{outcome.next_token}"] += outcome.probability
    return dict(law)


def expected_accepted(outcomes: Sequence[Outcome]) -> float:
    """E[tau]."""
    return sum(len(outcome.accepted) * outcome.probability for outcome in outcomes)


def emitted_law(model: Model, outcomes: Sequence[Outcome]) -> Law:
    """Law of the first L + 1 emitted tokens, an early stop being continued by the target."""
    law: Law = defaultdict(float)
    for outcome in outcomes:
        emitted = (*outcome.accepted, outcome.next_token)
        for rest in all_paths(model, model.length + 1 - len(emitted)):
            path = (*emitted, *rest)
            tail = np.prod([model.target[path[:i]][path[i]] for i in range(len(emitted), len(path))])
            law[path] += outcome.probability * float(tail)
    return law


def distance_from_target(model: Model, outcomes: Sequence[Outcome]) -> float:
    """Total variation between the emitted law and the target's own."""
    law = emitted_law(model, outcomes)
    return 0.5 * sum(abs(law[path] - joint(model.target, path)) for path in all_paths(model, model.length + 1))


def _last_success(accept: Tensor) -> Tensor:
    """[C, L + 1] probability that i is the last index whose test succeeds (0: none)."""
    failed_after = torch.cat([(1 - accept).flip(-1).cumprod(-1).flip(-1), torch.ones_like(accept[:, :1])], 1)
    succeeded = torch.cat([torch.ones_like(accept[:, :1]), accept], 1)
    return succeeded * failed_after


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
