"""`Engine.step`: the table of contents of the project.

Holds no algorithm of its own: it wires the parts together, checks requests at the door and
translates between the parts' addressings. One thread calls it; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.admission import check_request
from engine.cache.tensors import slots_of
from engine.config import EngineFacts, SpeculationConfig
from engine.drafters.draft import Draft
from engine.drafters.model import ModelDrafter, method_of
from engine.execution.inputs import NO_NODES, Nodes, SequenceInput
from engine.execution.runner import ModelRunner
from engine.metrics import PlainTimes, StepStats, Stopwatch
from engine.plan import Emission, Plan, Row, TargetLayer, Verdict
from engine.request import Request
from engine.sampling.law import LawParameters, law
from engine.sampling.noise import Purpose, uniform
from engine.scheduling.scheduler import Outcome, Scheduler
from engine.speculation.drafting import ChainNoise, LawTable
from engine.speculation.gap import acceptance_gap
from engine.speculation.layers import apply_layers
from engine.speculation.verification import RULES, ChainVerdict, Verify, lossy


@dataclass(frozen=True)
class StepResult:
    """What a step gave, and what it took."""

    outcomes: list[Outcome]
    stats: StepStats


class Engine:
    """Target, drafter and scheduler as one machine that advances in steps."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: ModelDrafter,
        scheduler: Scheduler,
        facts: EngineFacts,
        limits: SpeculationConfig,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.scheduler = scheduler
        self.facts = facts
        self.limits = limits
        self.plain_times: PlainTimes | None = None
        self.num_steps = 0
        self.stopwatch = Stopwatch()
        timed = self.stopwatch.timed
        self._draw = timed("draft", drafter.draw)
        self._forward = timed("target", self._forward_nodes)
        self._verify = timed("verify", self._verify_chains)
        self._keep = timed("keep", self._keep_accepted)

    def submit(self, request: Request) -> None:
        """Queue a request; raises RequestError where it cannot be served as asked."""
        check_request(request, self.facts, self.limits)
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False when it has already ended."""
        return self.scheduler.abort(request_id)

    def run_step(self) -> StepResult:
        """One step with its measurements."""
        self.stopwatch.start()
        outcomes = self.step()
        wall_s, phases_s = self.stopwatch.stop()
        self.num_steps += 1
        return StepResult(outcomes, self.stats(wall_s, self._plain_s(), phases_s))

    def stats(
        self, wall_s: float = 0.0, plain_s: float | None = None, phases_s: dict[str, float] | None = None
    ) -> StepStats:
        """The state now, with the times of the step that led to it; without times where no step was made."""
        scheduler = self.scheduler
        return StepStats(
            wall_s=wall_s,
            plain_s=plain_s,
            phases_s=phases_s or {},
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks_used=scheduler.pool.num_used,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.num_steps,
        )

    def _plain_s(self) -> float | None:
        """Duration of a plain step over the last plan's batch and contexts, where that is known."""
        plan = self.scheduler.last_plan
        if self.plain_times is None or plan.has_prefill or not plan.rows:
            return None
        return self.plain_times.step_s(len(plan.rows), sum(row.end for row in plan.rows) / len(plan.rows))

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Advance every planned sequence: sampling rows by at least one token, the others by a prompt chunk."""
        plan = self.scheduler.plan()  # who, how many tokens, which blocks
        verdict = self.run_parts(plan)
        return self.scheduler.commit(plan, verdict)  # append, finish, free

    def run_parts(self, plan: Plan) -> Verdict:
        """Carry out a plan on the device, whoever made it (the scheduler, or a measurement)."""
        draft = self._draw(plan)  # chains, and the law each token was drawn from
        logits_NV = self._forward(plan, draft)  # one pass over every drafted node
        winners = self._verify(plan, draft, logits_NV)  # the exact rule of each request
        self._keep(plan, draft, winners)  # forget the rejected branches
        return self._observe(plan, draft, logits_NV, Verdict(tuple(winner.emission for winner in winners)))

    def _forward_nodes(self, plan: Plan, draft: Draft | None) -> Tensor:
        """Target logits at the root and the nodes of every sampling row, in order."""
        trees = iter(draft.trees if draft is not None else ())
        parts = []
        for row in plan.rows:
            nodes, wanted = NO_NODES, slice(0, 0)
            if row.samples:
                tree = next(trees)
                nodes = Nodes(tree.tokens, tree.depths, (), tree.ancestry())
                wanted = slice(len(row.known) - 1, None)
            parts.append(SequenceInput(row.known, row.first_index, row.block_ids, nodes, wanted))
        return self.target.forward(parts)

    def _verify_chains(self, plan: Plan, draft: Draft | None, logits_NV: Tensor) -> list[Winner]:
        """What each sampling row emits, by the rule it asked for."""
        if draft is None:
            return []
        rows = plan.sampling_rows
        target = _target_laws(rows, draft, logits_NV)
        noise = _noise(draft, logits_NV.device)
        winners: list[Winner | None] = [None] * len(rows)
        by_rule: dict[Verify, list[int]] = {}
        for number, row in enumerate(rows):
            by_rule.setdefault(_rule_of(row), []).append(number)
        for verify, numbers in by_rule.items():
            if len(by_rule) == 1:
                verdict = verify(draft.chains, target, noise)
                chosen = np.arange(draft.layout.num_chains)
            else:
                chosen = np.flatnonzero(np.isin(draft.layout.request_C, numbers))
                index = torch.from_numpy(chosen).to(logits_NV.device)
                verdict = verify(draft.chains.select(index), target.select(index), noise.select(index))
            for number, winner in zip(numbers, _winners(draft, verdict, chosen), strict=True):
                winners[number] = winner
        return [winner for winner in winners if winner is not None]

    def _keep_accepted(self, plan: Plan, draft: Draft | None, winners: Sequence[Winner]) -> None:
        """Make the K/V of accepted paths contiguous in both models' storage."""
        target_moves: list[tuple[int, int]] = []
        draft_moves: list[tuple[int, int]] = []
        if draft is None:
            return
        for row, tree, winner in zip(plan.sampling_rows, draft.trees, winners, strict=True):
            count = len(winner.emission.accepted)
            if not count:
                continue
            slots = slots_of(row.block_ids, self.facts.block_size, 0, len(row.block_ids) * self.facts.block_size)
            path = tree.paths[winner.rank]
            for depth in range(1, count + 1):
                to = int(slots[row.end + depth - 1])
                target_moves.append((int(slots[row.end + path[depth] - 1]), to))
                if depth < row.draft_length:
                    draft_moves.append((int(slots[self.drafter.node_index(row, winner.rank, depth)]), to))
        self.target.keep([move for move in target_moves if move[0] != move[1]])
        self.drafter.keep([move for move in draft_moves if move[0] != move[1]])

    def _observe(self, plan: Plan, draft: Draft | None, logits_NV: Tensor, verdict: Verdict) -> Verdict:
        """On a share of the steps, note how far one row's rule stays below the optimum; which, the step number says."""
        chance, choice = uniform(0, self.num_steps, Purpose.OBSERVE, 0, np.arange(2)).tolist()
        rows = plan.sampling_rows
        if draft is None or chance >= self.limits.observed_share:
            return verdict
        number = int(choice * len(rows))
        row, speculation = rows[number], rows[number].speculation
        if not row.branching or row.sampling.is_greedy or speculation.over_acceptance:
            return verdict
        root = sum(1 + tree.num_nodes for tree in draft.trees[:number])
        p_1V = law(logits_NV[root : root + 1], LawParameters.of([row.sampling], logits_NV.device)).double()
        mine = torch.from_numpy(np.flatnonzero(draft.layout.request_C == number)).to(p_1V.device)
        chains = draft.chains.select(mine)
        q_1V = chains.draft.rows_at(0)[:1].double()
        if chains.layers is not None:
            nowhere = torch.zeros_like(mine[:1])
            p_1V, _ = apply_layers(p_1V, q_1V, chains.layers.select(nowhere), nowhere, nowhere)
        apart = row.num_drafts // row.branching[0]
        gap = acceptance_gap(
            speculation.rule,
            method_of(row),
            (p_1V[0] / p_1V.sum()).cpu().numpy(),
            (q_1V[0] / q_1V.sum()).cpu().numpy(),
            chains.tokens_CL[::apart, 0].tolist(),
        )
        emissions = list(verdict.emissions)
        emissions[number] = replace(emissions[number], gap=gap)
        return Verdict(tuple(emissions))


@dataclass(frozen=True)
class Winner:
    """The chain (by rank within its request) that a row follows, and what the row emits."""

    rank: int
    emission: Emission


def _target_laws(rows: Sequence[Row], draft: Draft, logits_NV: Tensor) -> LawTable:
    """The law of every node, and which node lies below the first i tokens of each chain."""
    counts = [1 + tree.num_nodes for tree in draft.trees]
    starts = np.cumsum([0, *counts[:-1]])
    node_CX = np.zeros((draft.layout.num_chains, draft.layout.max_length + 1), dtype=np.int64)
    chain = 0
    for start, tree in zip(starts, draft.trees, strict=True):
        for path in tree.paths:
            node_CX[chain, : len(path)] = path
            node_CX[chain] += start
            chain += 1
    row_N = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(logits_NV.device)
    parameters = LawParameters.of([row.sampling for row in rows], logits_NV.device)
    return LawTable(law(logits_NV, parameters.select(row_N)), torch.from_numpy(node_CX).to(logits_NV.device))


def _rule_of(row: Row) -> Verify:
    """How the row's chains are verified."""
    speculation = row.speculation
    if not row.branching:
        return RULES["block"].verify
    if speculation.over_acceptance > 0:
        return lossy(speculation.over_acceptance, speculation.over_acceptance_residual)
    # At temperature 0 every rule accepts the longest exact match; this one takes any set of drafts.
    return RULES["nss" if row.sampling.is_greedy and row.num_drafts > 1 else speculation.rule].verify


def _noise(draft: Draft, device: torch.device) -> ChainNoise:
    layout = draft.layout
    seed, position, rank = layout.seed_C, layout.position_C, layout.rank_C
    depth_L = np.arange(layout.max_length)

    def each(purpose: Purpose) -> Tensor:
        return torch.from_numpy(uniform(seed, position, purpose, rank)).to(device)

    def each_depth(purpose: Purpose) -> Tensor:
        numbers = uniform(seed[:, None], position[:, None], purpose, rank[:, None], depth_L)
        return torch.from_numpy(numbers.reshape(layout.num_chains, layout.max_length)).to(device)

    return ChainNoise(
        each_depth(Purpose.ACCEPT),
        each(Purpose.RESIDUAL),
        each(Purpose.SCORE),
        each_depth(Purpose.CHOSEN_ACCEPT),
        each(Purpose.CHOSEN_RESIDUAL),
    )


def _winners(draft: Draft, verdict: ChainVerdict, chosen: np.ndarray) -> list[Winner]:
    """The verdict of one rule on the host; `chosen` are the chains the rule saw."""
    winners = []
    tokens_B = zip(verdict.chain_B.tolist(), verdict.accepted_B.tolist(), verdict.next_token_B.tolist(), strict=True)
    layers = _layers(verdict)
    bias = [0.0] * len(layers) if verdict.bias_B is None else verdict.bias_B.tolist()
    for i, (local_chain, accepted, next_token) in enumerate(tokens_B):
        chain = int(chosen[local_chain])
        tree = draft.trees[int(draft.layout.request_C[chain])]
        rank = int(draft.layout.rank_C[chain])
        tokens = tuple(tree.tokens[node - 1] for node in tree.paths[rank][1 : accepted + 1])
        winners.append(Winner(rank, Emission(tokens, next_token, tree.num_nodes, layers=layers[i], bias=bias[i])))
    return winners


def _layers(verdict: ChainVerdict) -> list[tuple[TargetLayer, ...]]:
    """The layers that still hold, by request."""
    if verdict.layers is None:
        return [()] * len(verdict.chain_B)
    remaining, states, counts = (
        tensor.tolist()
        for tensor in (verdict.layers.remaining_CM, verdict.layers.state_CM4, verdict.layers.num_chains_CM)
    )
    return [
        tuple(TargetLayer(left, tuple(state), count) for left, state, count in zip(*of_row, strict=True) if left > 0)
        for of_row in zip(remaining, states, counts, strict=True)
    ]
