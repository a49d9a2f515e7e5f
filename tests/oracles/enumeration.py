"""Exact laws of one step by enumeration: every drafted path, every outcome, no sampling.

Small vocabularies.

Built on the quantities that the rules themselves compute (acceptance, residual, score interval,
weights), so that an error in them shows as a wrong law. Used by the exactness tests and by
the papers' tables. Not for: a serving engine.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.protocol import Chains, ProbsTable, TargetShifts
from engine.kernels.torch_block import blocks, residual, score_bounds
from engine.kernels.torch_kernels import TORCH
from engine.plan import TargetShift
from engine.speculation.target_shift import effective_laws
from engine.speculation.theory import Law
from engine.speculation.verification import RULES
from engine.speculation.verification.chain_rules import token_acceptance
from engine.speculation.verification.greedy_block import (
    GreedyBlocks,
    greedy_blocks,
    next_token_weights,
    selection_at,
    shifts_after,
)
from engine.speculation.verification.node import TopDown
from engine.speculation.verification.rule import NodeRule
from engine.speculation.verification.traversal import Stops, traverse
from tests.oracles.node_enumeration import conditional_laws, draft_tuples

Path = tuple[int, ...]
Rows = Mapping[Path, npt.ArrayLike]


@dataclass(frozen=True)
class RuleOutcome:
    """One possible result of a step.

    The accepted tokens, the token after them, and its probability.
    """

    accepted: Path
    next_token: int
    probability: float
    lower: float = 0.0
    upper: float = 1.0
    """Upper end of the interval on which the score of the score race is uniform."""
    path: Path = ()
    """The whole drafted chain, if the outcome belongs to one."""
    shifts: tuple[TargetShift, ...] = ()
    """Changes of the target law after this outcome."""


@dataclass(frozen=True)
class TabularModel:
    """Target and draft laws of every prefix up to the draft length."""

    target: Rows
    draft: Rows
    vocabulary: int
    length: int
    shifts: tuple[TargetShift, ...] = ()
    """Changes of the target law from the root on."""
    dtype: torch.dtype = torch.float64
    """Type of the laws that rules receive; a serving engine uses float32."""

    def rows(self, laws: Rows, prefixes: Sequence[Path]) -> Tensor:
        """Return [N, V] the laws below some prefixes."""
        return torch.from_numpy(np.array([np.asarray(laws[prefix], dtype=np.float64) for prefix in prefixes])).to(
            self.dtype
        )

    def law(self, laws: Rows, prefix: Path) -> Law:
        """Return the law below a prefix, in the precision that the rules receive."""
        row: Law = self.rows(laws, [prefix])[0].double().numpy()
        return row

    def paths(self, length: int) -> list[Path]:
        """Return every path of `length` tokens."""
        return list(itertools.product(range(self.vocabulary), repeat=length))


def joint(rows: Rows, path: Path) -> float:
    """Return the probability of a path."""
    return float(np.prod([np.asarray(rows[path[:i]])[token] for i, token in enumerate(path)]))


@dataclass(frozen=True)
class EveryChain:
    """Drafted paths as chains, with the laws along them."""

    model: TabularModel
    chains: Chains
    plain: ProbsTable
    target: ProbsTable
    """`plain` with the shifts applied."""
    states_CXM4: Tensor | None
    """States of the shifts."""
    paths: list[Path]

    @staticmethod
    def of(model: TabularModel) -> EveryChain:
        """Return every path, each as the chain of a separate request."""
        paths = model.paths(model.length)
        return EveryChain.among(model, paths, torch.arange(len(paths)))

    @staticmethod
    def among(model: TabularModel, paths: list[Path], request_C: Tensor) -> EveryChain:
        """Return these paths, as the chains of these requests."""
        prefixes = [prefix for length in range(model.length + 1) for prefix in model.paths(length)]
        number = {prefix: i for i, prefix in enumerate(prefixes)}
        inner = [prefix for prefix in prefixes if len(prefix) < model.length]
        node_CX = torch.tensor([[number[path[:i]] for i in range(model.length + 1)] for path in paths])

        counts = np.bincount(request_C.numpy())
        chains = Chains(
            torch.tensor(paths, dtype=torch.int64).reshape(len(paths), model.length),
            torch.full((len(paths),), model.length),
            request_C,
            ProbsTable(model.rows(model.draft, inner), node_CX[:, : model.length], TORCH),
            (len(counts), int(counts.max())),
            shifts=_shifts(model, len(paths)),
        )
        plain = ProbsTable(model.rows(model.target, prefixes), node_CX, TORCH)
        target, states_CXM4 = effective_laws(chains, plain)
        return EveryChain(model, chains, plain, target, states_CXM4, paths)

    def depth(self, depth: int) -> Tensor:
        """Return [C] the same depth for every chain."""
        return torch.full_like(self.chains.length_C, depth)


def _shifts(model: TabularModel, count: int) -> TargetShifts | None:
    if not model.shifts:
        return None
    remaining = torch.tensor([shift.remaining for shift in model.shifts])
    states = torch.tensor([shift.state for shift in model.shifts], dtype=torch.float64)
    num_chains = torch.tensor([shift.num_chains for shift in model.shifts])
    return TargetShifts(remaining.expand(count, -1), states.expand(count, -1, -1), num_chains.expand(count, -1))


def stop_law(accept_CL: Tensor) -> Tensor:
    """Return [C, L + 1] the probability that i is the last index whose test succeeds (0: none)."""
    one_C1 = torch.ones_like(accept_CL[:, :1])
    failed_after = torch.cat([(1 - accept_CL).flip(-1).cumprod(-1).flip(-1), one_C1], 1)
    return torch.cat([one_C1, accept_CL], 1) * failed_after


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def block_outcomes(every: EveryChain, residual_weight_CL1: Tensor | None = None) -> list[RuleOutcome]:
    """Enumerate block verification of one chain.

    `residual_weight_CL1` replaces the residual's weights (for wrong variants).
    """
    chains, target, model = every.chains, every.target, every.model
    known = blocks(chains, target)
    stop = stop_law(known.accept_CL)
    weight_CL1 = known.weight_CL1 if residual_weight_CL1 is None else residual_weight_CL1
    outcomes = []
    for tau in range(model.length + 1):
        tau_C = every.depth(tau)
        law = _normalised(residual(chains, target, tau_C, weight_CL1[:, tau]))
        for token in range(model.vocabulary):
            lower, upper = score_bounds(chains, target, known, tau_C, torch.full_like(tau_C, token))
            for i, path in enumerate(every.paths):
                drafted = joint(model.draft, path)
                if drafted > 0 and (probability := drafted * float(stop[i, tau] * law[i, token])) > 0:
                    outcomes.append(RuleOutcome(path[:tau], token, probability, float(lower[i]), float(upper[i]), path))
    return outcomes


def token_outcomes(every: EveryChain) -> list[RuleOutcome]:
    """Enumerate token verification of one chain."""
    chains, target, model = every.chains, every.target, every.model
    accept = token_acceptance(chains, target)
    reached = torch.cat([torch.ones_like(accept[:, :1]), accept.cumprod(-1)], 1)
    stop = reached - torch.cat([reached[:, 1:], torch.zeros_like(accept[:, :1])], 1)
    outcomes = []
    for tau in range(model.length + 1):
        one_C = torch.ones(len(every.paths), dtype=torch.float64)
        law = _normalised(residual(chains, target, every.depth(tau), one_C))
        for i, path in enumerate(every.paths):
            if (drafted := joint(model.draft, path)) == 0:
                continue
            for token in range(model.vocabulary):
                outcomes.append(RuleOutcome(path[:tau], token, drafted * float(stop[i, tau] * law[i, token])))
    return outcomes


def race(outcomes_by_chain: Sequence[Sequence[RuleOutcome]]) -> list[RuleOutcome]:
    """Return the winner's outcomes if independent chains race for the smallest score.

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
            winners.append(
                RuleOutcome(o.accepted, o.next_token, o.probability * float(share), o.lower, o.upper, o.path)
            )
    return winners


def _distribution(outcomes: Sequence[RuleOutcome], at: Law) -> Law:
    total = np.zeros_like(at)
    for o in outcomes:
        span = o.upper - o.lower
        inside = (at - o.lower) / span if span > 0 else (at >= o.upper).astype(float)
        total += o.probability * np.clip(inside, 0, 1)
    return total


def greedy_block_outcomes(every: EveryChain, num_chains: int = 1) -> list[RuleOutcome]:
    """Enumerate greedy block verification of one chain.

    Of several chains, it is the one that the score race selects.
    """
    selected: dict[Path, float] = {path: joint(every.model.draft, path) for path in every.paths}
    if num_chains > 1:
        selected = dict.fromkeys(selected, 0.0)
        for winner in race([block_outcomes(every)] * num_chains):
            selected[winner.path] += winner.probability
    count_C = torch.full_like(every.chains.length_C, num_chains)
    known = greedy_blocks(every.chains, every.target, count_C)
    stop = stop_law(known.accept_CL)
    outcomes = []
    for tau in range(every.model.length + 1):
        for token, law, shifts in _greedy_ends(every, known, count_C, tau):
            for i, path in enumerate(every.paths):
                probability = selected[path] * float(stop[i, tau] * law[i, token])
                if probability > 0:
                    outcomes.append(RuleOutcome(path[:tau], token, probability, path=path, shifts=shifts[i]))
    return outcomes


def _greedy_ends(
    every: EveryChain, known: GreedyBlocks, count_C: Tensor, tau: int
) -> Iterator[tuple[int, Tensor, list[tuple[TargetShift, ...]]]]:
    """Return (next token, its law, the resulting shifts) after `tau` accepted tokens.

    Laws and shifts are by chain.
    """
    tau_C = every.depth(tau)
    selection = selection_at(every.chains, every.target, known, count_C, tau_C)
    law = _normalised(next_token_weights(every.chains, selection, tau_C))
    for token in range(every.model.vocabulary):
        token_C = torch.full_like(tau_C, token)
        after = shifts_after(every.chains, every.plain, every.states_CXM4, selection, count_C, tau_C, token_C)
        rows = zip(after.remaining_CM.tolist(), after.state_CM4.tolist(), after.num_chains_CM.tolist(), strict=True)
        shifts = [tuple(TargetShift(r, tuple(s), n) for r, s, n in zip(*row, strict=True) if r > 0) for row in rows]
        yield token, law, shifts


def top_down_outcomes(model: TabularModel, rule: NodeRule, fanout: Sequence[int], method: str) -> list[RuleOutcome]:
    """Compose a node rule down a tree of drafts.

    The continuation of a node depends only on its text and on the number of drafts above it that
    still agree, so all paths with the same two are one node.
    """
    ends: dict[tuple[Path, int], float] = defaultdict(float)
    level: dict[tuple[Path, int], float] = {((), 1): 1.0}
    for branches in fanout[: model.length]:
        below: dict[tuple[Path, int], float] = defaultdict(float)
        for (prefix, alive), probability in level.items():
            p, q = model.law(model.target, prefix), model.law(model.draft, prefix)
            drafts = draft_tuples(method, q, alive * branches)
            probs_TV = conditional_laws(rule, p, q, drafts, alive * branches)
            reached_TV = probability * np.array(list(drafts.values()))[:, np.newaxis] * probs_TV
            for drawn, reached_V in zip(drafts, reached_TV.tolist(), strict=True):
                for y, reached in enumerate(reached_V):
                    if reached > 0 and y in drawn:
                        below[(*prefix, y), drawn.count(y)] += reached
                    elif reached > 0:
                        ends[prefix, y] += reached
        level = below
    for (prefix, _), probability in level.items():
        for y, chance in enumerate(model.law(model.target, prefix).tolist()):
            ends[prefix, y] += probability * chance
    return [RuleOutcome(prefix, y, probability) for (prefix, y), probability in ends.items() if probability > 0]


def drafted_trees(model: TabularModel, fanout: Sequence[int], method: str) -> list[tuple[float, list[Path]]]:
    """Return (probability, leaves in order) of every tree that can be drawn."""

    def below(prefix: Path) -> list[tuple[float, list[Path]]]:
        if len(prefix) == len(fanout):
            return [(1.0, [prefix])]
        trees = []
        q = np.asarray(model.draft[prefix], dtype=np.float64)
        for drawn, weight in draft_tuples(method, q, fanout[len(prefix)]).items():
            for parts in itertools.product(*(below((*prefix, token)) for token in drawn)):
                probability = weight * float(np.prod([part[0] for part in parts]))
                trees.append((probability, [leaf for part in parts for leaf in part[1]]))
        return trees

    return below(())


def traversal_outcomes(model: TabularModel, fanout: Sequence[int], method: str) -> list[RuleOutcome]:
    """Enumerate traversal verification of every tree.

    All trees are walked at once to the root, and nothing is drawn.
    """
    trees = drafted_trees(model, fanout, method)
    leaves = [leaf for _, tree in trees for leaf in tree]
    request_C = torch.tensor([number for number, (_, tree) in enumerate(trees) for _ in tree])
    every = EveryChain.among(model, leaves, request_C)
    left = np.array([probability for probability, _ in trees])
    outcomes: list[RuleOutcome] = []

    def record(stops: Stops) -> Tensor:
        weight = np.where(stops.depth_B.numpy() == 0, 1.0, stops.weight_B.numpy())
        for i in np.flatnonzero(stops.leaf_B.numpy()).tolist():
            taken, law = left[i] * weight[i], stops.probs_BV[i].numpy()
            accepted = trees[i][1][int(stops.rank_B[i])][: int(stops.depth_B[i])]
            tokens = np.flatnonzero(law).tolist()
            outcomes.extend(RuleOutcome(accepted, y, taken * float(law[y] / law.sum())) for y in tokens)
            left[i] -= taken
        return torch.zeros_like(stops.leaf_B)

    traverse(every.chains, every.target, record)
    return outcomes


def rule_outcomes(name: str, model: TabularModel, fanout: Sequence[int], method: str) -> list[RuleOutcome]:
    """Enumerate one step of a rule of RULES on a tree (or chains) drawn by a method.

    Includes the changes of later laws by shifts.
    """
    verify = RULES[name].verify
    if isinstance(verify, TopDown):
        return top_down_outcomes(model, verify.node_rule, fanout, method)
    if name == "traversal":
        return traversal_outcomes(model, fanout, method)
    every = EveryChain.of(model)
    if name == "token":
        return token_outcomes(every)
    if name in ("greedy_block", "spectr_gbv"):
        return greedy_block_outcomes(every, fanout[0])
    assert name in ("block", "bv_race"), name
    return race([block_outcomes(every)] * fanout[0])


def first_block_law(outcomes: Sequence[RuleOutcome]) -> dict[str, float]:
    """Return the probability of each "accepted|next"."""
    law: dict[str, float] = defaultdict(float)
    for outcome in outcomes:
        law[",".join(map(str, outcome.accepted)) + f"|{outcome.next_token}"] += outcome.probability
    return dict(law)


def expected_accepted(outcomes: Sequence[RuleOutcome]) -> float:
    """Return E[tau]."""
    return sum(len(outcome.accepted) * outcome.probability for outcome in outcomes)
