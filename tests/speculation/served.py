"""Many requests over small models for served rules, and whether they emit right.

A *kind* of request is a model, the place in its text where the requests begin, and how they
are drafted. Requests of all kinds of a batch stand in turn in every call, so that neighbours
have other laws, lengths and numbers of chains. Two laws are compared with the exact ones. That
of a first step's (accepted tokens, next token) with the enumeration of the rule; that of the
first emitted tokens, over as many steps as these take, with the target's own, which no formula
of the rule enters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable, TargetShifts
from engine.kernels.torch_kernels import Kernels
from engine.plan import TargetShift
from engine.speculation.drafting import children, method_below
from engine.speculation.rule_facts import MOST_LIKELY
from engine.speculation.theory import Law
from engine.speculation.verification import Verify
from engine.start.choosing import choose
from tests.engine.tiny import DEVICE
from tests.oracles.enumeration import EveryChain, Path, RuleOutcome, TabularModel, rule_outcomes
from tests.speculation.exact import from_prefix, random_model

KERNELS = choose(DEVICE)
"""Kernels that serve."""
WITHOUT_DECIDE: Kernels = type("WithoutDecide", (type(KERNELS),), {"decides": False})()
"""The same, in separate operations, as on a device: text drafts are verified before the rules."""

_MOST_TREES = 3000
# Less likely than this is impossible, up to the rounding of the exact law; cells with fewer draws
# expected are merged.
_IMPOSSIBLE, _RARE = 1e-10, 5.0

NoiseOf = Callable[[Chains, int], ChainNoise]
"""The noise of some chains in the step of a number."""


def small_world(corner: str, vocabulary: int, seed: int, length: int = 5) -> TabularModel:
    """Target and draft laws of every prefix, generic or with one corner all over."""
    world = random_model(seed, vocabulary, length, "dense")
    target, draft = ({path: np.array(row) for path, row in rows.items()} for rows in (world.target, world.draft))
    chance = np.random.default_rng(seed)
    for path, p in target.items():
        q = draft[path]
        if corner == "zeros":
            p[chance.integers(vocabulary)] = q[chance.integers(vocabulary)] = 0
        elif corner == "ties":
            p[:], q[:] = (chance.permutation([2.0, 2.0, *[1.0] * (vocabulary - 2)]) for _ in range(2))
        elif corner == "equal":
            q[:] = p
        elif corner == "disjoint":
            half = chance.integers(1, vocabulary)
            p[:half] = q[half:] = 0
        elif corner == "near":
            q[:] = 0.8 * p + 0.2 * q
        for law in (p, q):
            law /= law.sum()
    return TabularModel(target, draft, vocabulary, length)


@dataclass(frozen=True)
class RequestCase:
    """Requests that are alike."""

    world: TabularModel
    """Laws of every prefix that several steps can reach."""
    fanout: tuple[int, ...]
    """Children of every drawn node by depth; empty when nothing is drawn."""
    method: str = "iid"
    start: Path = ()
    """Text of the world that the requests continue."""
    shifts: tuple[TargetShift, ...] = ()
    """Changes of the target law that hold from there on."""

    @property
    def num_chains(self) -> int:
        return prod(self.fanout)

    @property
    def length(self) -> int:
        return len(self.fanout)

    def outcomes(self, rule: str, dtype: torch.dtype) -> list[RuleOutcome]:
        """Every way the first step can end."""
        model = replace(from_prefix(self.world, self.start, self.length, self.shifts), dtype=dtype)
        if not self.fanout:
            law = model.law(model.target, ())
            return [RuleOutcome((), token, float(law[token])) for token in range(model.vocabulary)]
        return rule_outcomes(rule, model, self.fanout, self.method)

    def is_enumerable(self, rule: str) -> bool:
        """Whether the enumeration knows the kind's drafts.

        Not where a node has fewer likely tokens than children: what fills up is the drafter's
        choice, and so is which of equally likely tokens are the most likely ones. And not where a
        rule looks at whole trees, and there are too many.
        """
        if rule == "traversal" and self.world.vocabulary ** sum(self._widths) > _MOST_TREES:
            return False
        return self.method == "iid" or all(
            self._is_definite(np.sort(self.world.draft[self.start + path])[::-1], count)
            for depth, count in enumerate(self.fanout)
            for path in self.world.paths(depth)
        )

    def _is_definite(self, descending_V: Law, count: int) -> bool:
        num_likely = {"greedy": count - 1, MOST_LIKELY: count}.get(self.method, 0)
        tied = 0 < num_likely < len(descending_V) and descending_V[num_likely - 1] == descending_V[num_likely]
        return bool(np.count_nonzero(descending_V) >= count and not tied)

    @property
    def _widths(self) -> list[int]:
        """Nodes by depth."""
        return [prod(self.fanout[: depth + 1]) for depth in range(self.length)]


@dataclass(frozen=True)
class WorldNodes:
    """The laws of all worlds of a batch, a row for every prefix."""

    target_NV: Tensor
    draft_NV: Tensor
    child_NV: Tensor
    """Row below each row's token; 0 where the world ends."""
    number: Mapping[tuple[int, Path], int]
    """Row by (identity of the world, prefix)."""

    @staticmethod
    def of(worlds: Sequence[TabularModel], dtype: torch.dtype) -> WorldNodes:
        different = {id(world): world for world in worlds}
        keys = [
            (name, path)
            for name, world in different.items()
            for depth in range(world.length + 1)
            for path in world.paths(depth)
        ]
        number = {key: i for i, key in enumerate(keys)}
        target, draft = (
            np.array([np.asarray(getattr(different[name], which)[path]) for name, path in keys])
            for which in ("target", "draft")
        )
        child = [[number.get((name, (*path, x)), 0) for x in range(target.shape[1])] for name, path in keys]
        target_NV, draft_NV = (torch.from_numpy(law.astype(np.float64)).to(dtype) for law in (target, draft))
        return WorldNodes(target_NV, draft_NV, torch.tensor(child), number)


@dataclass(frozen=True)
class Emitted:
    """Emitted tokens of the requests of one case."""

    first: list[tuple[Path, int]]
    """(accepted tokens, next token) of every request's first step."""
    text: list[Path]
    """The first tokens of every request, over all its steps."""


def moved(part: Any, device: torch.device) -> Any:
    """The tensors of a dataclass on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{one.name: moved(getattr(part, one.name), device) for one in fields(part)})


class Batch:
    """Requests of several kinds in turn, through a rule step by step."""

    def __init__(
        self,
        kinds: Sequence[RequestCase],
        num_requests: int,
        seed: int,
        dtype: torch.dtype,
        kernels: Kernels = KERNELS,
    ) -> None:
        """num_requests: of every kind."""
        self.kinds, self.kernels = kinds, kernels
        self.nodes = WorldNodes.of([kind.world for kind in kinds], dtype)
        self.chance = np.random.default_rng(seed)
        self.kind_B = torch.arange(len(kinds)).repeat(num_requests)
        starts = [self.nodes.number[id(kind.world), kind.start] for kind in kinds]
        self.node_B = torch.tensor(starts)[self.kind_B]
        most = max(len(kind.shifts) for kind in kinds)
        self.shifts = _shifts(kinds, most).select(self.kind_B) if most else None

    def noise(self, chains: Chains, _: int = 0) -> ChainNoise:
        """Fresh numbers."""
        length = chains.max_length
        numbers = torch.from_numpy(self.chance.random((2 * length + 3, chains.num_chains)))
        return ChainNoise(
            numbers[:length].T,
            numbers[2 * length],
            numbers[2 * length + 1],
            numbers[length : 2 * length].T,
            numbers[-1],
        )

    def run(self, verify: Verify, num_tokens: int, noise: NoiseOf | None = None) -> list[Emitted]:
        """Return the emitted tokens by case, until each request has `num_tokens`."""
        num_requests = len(self.kind_B)
        texts: list[list[int]] = [[] for _ in range(num_requests)]
        firsts: list[tuple[Path, int]] = []
        going_B, step = torch.arange(num_requests), 0
        while len(going_B):
            chains, target = self.drafted(going_B)
            on_device = (moved(part, DEVICE) for part in (chains, target, (noise or self.noise)(chains, step)))
            verdict = moved(verify(*on_device), torch.device("cpu"))
            ends = self._ends(chains, verdict)
            for request, (accepted, token) in zip(going_B.tolist(), ends, strict=True):
                texts[request] += [*accepted, token]
            firsts = firsts or ends
            self._go_on(going_B, chains, target, verdict)
            going_B = torch.tensor([b for b in going_B.tolist() if len(texts[b]) < num_tokens], dtype=torch.int64)
            step += 1
        paths = [tuple(text[:num_tokens]) for text in texts]
        every = len(self.kinds)
        return [Emitted(firsts[i::every], paths[i::every]) for i in range(every)]

    def drafted(self, request_B: Tensor) -> tuple[Chains, ProbsTable]:
        """Return chains below some requests, and the target's laws along them."""
        kind_B, node_B = self.kind_B[request_B], self.node_B[request_B]
        count_B = torch.tensor([kind.num_chains for kind in self.kinds])[kind_B]
        first_B, num_chains = count_B.cumsum(0) - count_B, int(count_B.sum())
        length_B = torch.tensor([kind.length for kind in self.kinds])[kind_B]
        length = int(length_B.max())
        tokens_CL = torch.zeros((num_chains, length), dtype=torch.int64)
        leads_CL = torch.zeros((num_chains, length), dtype=torch.bool)
        node_CX = torch.from_numpy(self.chance.integers(0, len(self.nodes.draft_NV), (num_chains, length + 1)))
        for number, kind in enumerate(self.kinds):
            is_of_case = kind_B == number
            if bool(is_of_case.any()):
                chain_RK = first_B[is_of_case].unsqueeze(1) + torch.arange(kind.num_chains)
                self._draw(kind, chain_RK, node_B[is_of_case], tokens_CL, leads_CL, node_CX)
        is_tree = any(count > 1 for kind in self.kinds for count in kind.fanout[1:])
        chains = Chains(
            tokens_CL,
            length_B.repeat_interleave(count_B),
            torch.arange(len(request_B)).repeat_interleave(count_B),
            ProbsTable(self.nodes.draft_NV, node_CX[:, :length], self.kernels),
            (len(request_B), int(count_B.max())),
            leads_CL if is_tree else None,
            None if self.shifts is None else self.shifts.select(request_B.repeat_interleave(count_B)),
        )
        return chains, ProbsTable(self.nodes.target_NV, node_CX, self.kernels)

    def _draw(
        self, kind: RequestCase, chain_RK: Tensor, node_R: Tensor, tokens_CL: Tensor, leads_CL: Tensor, node_CX: Tensor
    ) -> None:
        """Level by level; a chain leads a node when it is the first of those below it."""
        node_RW = node_R.unsqueeze(1)
        node_CX[chain_RK, 0] = node_RW
        for depth, count in enumerate(kind.fanout):
            uniform = torch.from_numpy(self.chance.random((node_RW.numel(), count)))
            method = method_below(kind.method, count)
            token_RW = children(self.kernels, method, self.nodes.draft_NV[node_RW.reshape(-1)], uniform).reshape(
                len(node_R), -1
            )
            node_RW = self.nodes.child_NV[node_RW.repeat_interleave(count, 1), token_RW]
            below = kind.num_chains // token_RW.shape[1]
            tokens_CL[chain_RK, depth] = token_RW.repeat_interleave(below, 1)
            node_CX[chain_RK, depth + 1] = node_RW.repeat_interleave(below, 1)
            leads_CL[chain_RK, depth] = torch.arange(kind.num_chains) % below == 0

    def _ends(self, chains: Chains, verdict: ChainVerdict) -> list[tuple[Path, int]]:
        """Return (accepted tokens, next token) by request, each of its own chains."""
        assert torch.equal(chains.request_C[verdict.chain_B], torch.arange(len(verdict.chain_B)))
        assert bool((verdict.accepted_B <= chains.length_C[verdict.chain_B]).all())
        tokens = chains.tokens_CL[verdict.chain_B].tolist()
        rows = zip(tokens, verdict.accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True)
        return [(tuple(chain[:accepted]), token) for chain, accepted, token in rows]

    def _go_on(self, request_B: Tensor, chains: Chains, target: ProbsTable, verdict: ChainVerdict) -> None:
        node_B = target.select(verdict.chain_B).row_CX.gather(1, verdict.accepted_B.unsqueeze(1)).squeeze(1)
        self.node_B[request_B] = self.nodes.child_NV[node_B, verdict.next_token_B]
        if verdict.shifts is None:
            return
        rows, width = len(self.kind_B), verdict.shifts.remaining_CM.shape[1]
        self.shifts = TargetShifts(
            torch.zeros((rows, width), dtype=torch.int64),
            torch.zeros((rows, width, 4), dtype=torch.float64),
            torch.ones((rows, width), dtype=torch.int64),
        )
        for name in ("remaining_CM", "state_CM4", "num_chains_CM"):
            getattr(self.shifts, name)[request_B] = getattr(verdict.shifts, name)


def _shifts(kinds: Sequence[RequestCase], most: int) -> TargetShifts:
    """Return the shifts by case; entries with 0 remaining positions are padding."""
    remaining, states = np.zeros((len(kinds), most), dtype=np.int64), np.zeros((len(kinds), most, 4))
    counts = np.ones((len(kinds), most), dtype=np.int64)
    for i, kind in enumerate(kinds):
        for j, shift in enumerate(kind.shifts):
            remaining[i, j], states[i, j], counts[i, j] = shift.remaining, shift.state, shift.num_chains
    return TargetShifts(torch.from_numpy(remaining), torch.from_numpy(states), torch.from_numpy(counts))


def first_law(outcomes: Sequence[RuleOutcome]) -> dict[tuple[Path, int], float]:
    """Probability of (accepted tokens, next token)."""
    law: dict[tuple[Path, int], float] = {}
    for outcome in outcomes:
        key = (outcome.accepted, outcome.next_token)
        law[key] = law.get(key, 0.0) + outcome.probability
    return law


def text_law(kind: RequestCase, num_tokens: int) -> dict[Path, float]:
    """Return the target's law of the first tokens, changed where its shifts hold."""
    every = EveryChain.of(from_prefix(kind.world, kind.start, num_tokens, kind.shifts))
    chance_C = torch.ones(len(every.paths), dtype=torch.float64)
    for depth in range(num_tokens):
        chance_C *= every.target.probability(every.depth(depth), every.chains.tokens_CL[:, depth])
    return dict(zip(every.paths, chance_C.tolist(), strict=True))


@dataclass(frozen=True)
class Fit:
    """Distance of counts from their laws: the statistic of a G-test, and its degrees of freedom."""

    statistic: float = 0.0
    freedom: int = 0

    def __add__(self, other: Fit) -> Fit:
        return Fit(self.statistic + other.statistic, self.freedom + other.freedom)

    @property
    def p_value(self) -> float:
        return float(chi2.sf(self.statistic, self.freedom)) if self.freedom else float(self.statistic == 0)


End = TypeVar("End")


def fit(draws: Sequence[End], law: Mapping[End, float]) -> Fit:
    """Compare draws with their law; infinite if something impossible was drawn."""
    counts: dict[End, int] = {}
    for end in draws:
        counts[end] = counts.get(end, 0) + 1
    if any(law.get(end, 0.0) < _IMPOSSIBLE for end in counts):
        return Fit(np.inf, 1)
    total, mass = len(draws), sum(law.values())
    cells = [(total * law[end] / mass, counts.get(end, 0)) for end in sorted(law, key=law.__getitem__)]
    merged = [[0.0, 0]]
    for expected, count in cells:
        if merged[-1][0] >= _RARE:
            merged.append([0.0, 0])
        merged[-1][0] += expected
        merged[-1][1] += count
    expected_M, count_M = np.array(merged).T
    terms = count_M * np.log(np.maximum(count_M, 1) / expected_M)
    return Fit(2 * float(terms.sum()), len(merged) - 1)
