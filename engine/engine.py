"""`Engine.step`: the table of contents of the project.

Holds no algorithm of its own: it wires the parts together, checks requests at the door and
translates between the parts' addressings. One thread calls it; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.admission import check_request
from engine.cache.tensors import Moves, slots_of
from engine.config import EngineFacts, SpeculationConfig
from engine.drafters.draft import Draft
from engine.drafters.model import ModelDrafter
from engine.errors import RequestError
from engine.execution.inputs import NO_NODES, Nodes, SequenceInput
from engine.execution.runner import ModelRunner
from engine.metrics import Overhead, StepStats, Stopwatch
from engine.pace import Pace, Step
from engine.plan import Plan, Verdict
from engine.request import Request
from engine.sampling.following import FollowedGrammar, Following, GrammarSource
from engine.scheduling.controller import added
from engine.scheduling.outcome import Outcome
from engine.scheduling.scheduler import Scheduler
from engine.verifying import Winner, observe_gap, split_prompts, verify_chains

Failures = Sequence[tuple[str, RequestError]]
"""Requests (by id) that have ended with an error."""

# Grammars are followed for the requests that run, and for as many that are next.
_GRAMMARS_PER_SEAT = 2


@dataclass(frozen=True)
class StepResult:
    """What a step gave, and what it took."""

    outcomes: list[Outcome]
    stats: StepStats
    failed: Failures = ()
    """Requests that could not go on."""


class Engine:
    """Target, drafter and scheduler as one machine that advances in steps."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: ModelDrafter,
        scheduler: Scheduler,
        facts: EngineFacts,
        limits: SpeculationConfig,
        grammars: GrammarSource,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.scheduler = scheduler
        self.facts = facts
        self.limits = limits
        self.following = Following(grammars, _GRAMMARS_PER_SEAT * scheduler.config.max_num_seqs)
        self.pace: Pace | None = None
        """Of plain decoding; None where it was not measured."""
        self.num_steps = 0
        self.stopwatch = Stopwatch()
        timed = self.stopwatch.timed
        self._overhead = Overhead()
        self._controlled_s = 0.0
        self._run_parts = timed("parts", self.run_parts)
        self._draw = timed("draft", drafter.draw)
        self._forward = timed("target", self._forward_nodes)
        self._verify = timed("verify", verify_chains)
        self._keep = timed("keep", self._keep_accepted)

    def submit(self, request: Request) -> None:
        """Queue a request; raises RequestError where it cannot be served as asked."""
        check_request(request, self.facts, self.limits)
        if request.sampling.grammar:
            self.following.add(request)
        else:
            self._queue(request, None)

    def queue_followed(self) -> tuple[list[str], Failures]:
        """Queue the requests whose grammars have become ready; (their ids, those whose grammars cannot be followed)."""
        ready, failed = self.following.ready()
        for request, grammar in ready:
            self._queue(request, grammar)
        return [request.request_id for request, _ in ready], failed

    def _queue(self, request: Request, grammar: FollowedGrammar | None) -> None:
        speculation = request.speculation
        drafts = bool(speculation.num_drafts)
        self.scheduler.submit(request, grammar, drafts and self.facts.rules[speculation.rule].changes_targets)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False when it has already ended."""
        is_known = self.following.end(request_id) or self.scheduler.abort(request_id)
        if not self.scheduler.has_work:
            self._overhead.pause()  # the next step is not the next of these
        return is_known

    def run_step(self) -> StepResult:
        """One step with its measurements."""
        self.stopwatch.start()
        outcomes = self.step()
        failed = self._end_followed(outcomes)
        wall_s, phases_s = self.stopwatch.stop()
        self.num_steps += 1
        # What lies around the parts of a step, planning and messages, a plain step has too; but it has no controller.
        around_s = self._overhead.add(self.stopwatch, self.scheduler.has_work, self._controlling_s())
        self._note_time(wall_s)
        plain_s, prompt_s = self._beside_plain(around_s.usual, self.stopwatch.parts_s - phases_s["draft"])
        gone = {request_id for request_id, _ in failed}
        outcomes = [outcome for outcome in outcomes if outcome.request_id not in gone]
        return StepResult(outcomes, self.stats(wall_s + around_s.before, plain_s, prompt_s, phases_s), failed)

    def _end_followed(self, outcomes: Sequence[Outcome]) -> Failures:
        """Requests whose grammars failed in this step; nothing is followed for them any more, nor for who has ended."""
        failed = self.following.failed()
        for request_id, _ in failed:
            self.scheduler.abort(request_id)
        for outcome in outcomes:
            if outcome.finish_reason is not None:
                self.following.end(outcome.request_id)
        return failed

    def _controlling_s(self) -> float:
        """What the controller has taken since the last call."""
        controller = self.scheduler.controller
        before_s, self._controlled_s = self._controlled_s, controller.spent_s if controller is not None else 0.0
        return max(0.0, self._controlled_s - before_s)

    def pause(self) -> None:
        """What lies between the last step and the next is something else, which no step pays for."""
        self._overhead.pause()

    def stats(
        self,
        wall_s: float = 0.0,
        plain_s: float | None = None,
        prompt_s: float = 0.0,
        phases_s: dict[str, float] | None = None,
    ) -> StepStats:
        """The state now, with the times of the step that led to it; without times where no step was made."""
        scheduler = self.scheduler
        return StepStats(
            wall_s=wall_s,
            plain_s=plain_s,
            prompt_s=prompt_s,
            phases_s=phases_s or {},
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self.following.num_waiting,
            num_blocks_used=scheduler.blocks.num_used,
            num_preemptions=scheduler.num_preemptions,
            num_cache_queries=scheduler.num_cache_queries,
            num_cache_hits=scheduler.num_cache_hits,
            num_steps=self.num_steps,
        )

    def _note_time(self, wall_s: float) -> None:
        """Tell the controller how long a step took that only decoded: no prompts, copied tokens, catching up."""
        controller, plan = self.scheduler.controller, self.scheduler.last_plan
        if (
            controller is None
            or not plan.rows
            or plan.has_prefill
            or plan.is_behind
            or any(row.copies for row in plan.rows)
        ):
            return
        drafting = [row.widths for row in plan.rows if row.branching]
        num_text = sum(row.end for row in plan.rows)
        controller.note_time(len(plan.rows), len(drafting), added(drafting), wall_s, num_text)

    def _beside_plain(self, around_s: float, seconds: float) -> tuple[float | None, float]:
        """Duration of a plain step over the rows of the last plan that emit, and of what that plan's prompts took;
        (None, 0) where that is not known.

        around_s: what lies around the parts of a step; seconds: those of the last step, without drafting.
        """
        plan = self.scheduler.last_plan
        rows = plan.sampling_rows
        if self.pace is None or not rows:
            return None, 0.0
        beside = self.pace.add(
            Step(
                started=self.stopwatch.started,
                seconds=seconds,
                num_rows=len(rows),
                context=sum(row.end for row in rows) / len(rows),
                num_nodes=sum(row.num_nodes for row in rows),
                has_prompts=plan.has_prefill,
                is_behind=plan.is_behind,
            )
        )
        return (beside.plain_s + around_s, beside.prompt_s) if beside is not None else (None, 0.0)

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Advance every planned sequence: sampling rows by at least one token, the others by a prompt chunk."""
        plan = self.scheduler.plan()  # who, how many tokens, which blocks
        verdict = self._run_parts(plan)
        return self.scheduler.commit(plan, verdict)  # append, finish, free

    def run_parts(self, plan: Plan) -> Verdict:
        """Carry out a plan on the device, whoever made it (the scheduler, or a measurement)."""
        draft = self._draw(plan)  # chains, and the law each token was drawn from
        logits_NV = self._forward(plan, draft)  # one pass over every drafted node
        prompt_logprobs, logits_NV = split_prompts(plan, draft, logits_NV)
        winners = self._verify(plan, draft, logits_NV)  # the exact rule of each request
        self._keep(plan, draft, winners)  # forget the rejected branches
        verdict = Verdict(tuple(winner.emission for winner in winners), prompt_logprobs)
        return observe_gap(plan, draft, logits_NV, verdict, self.num_steps, self.limits.observed_share)

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
            if row.prompt_next:
                wanted = slice(0, None)
            parts.append(SequenceInput(row.known, row.first_index, row.block_ids, nodes, wanted))
        return self.target.forward(parts)

    def _keep_accepted(self, plan: Plan, draft: Draft | None, winners: Sequence[Winner]) -> None:
        """Make the K/V of accepted paths contiguous in both models' storage."""
        if draft is None:
            return
        target_moves: list[Moves] = []
        draft_moves: list[Moves] = []
        for row, tree, winner in zip(plan.sampling_rows, draft.trees, winners, strict=True):
            count = len(winner.emission.accepted)
            if not count:
                continue
            slots = slots_of(row.block_ids, self.facts.block_size, 0, len(row.block_ids) * self.facts.block_size)
            path = tree.paths[winner.rank]
            of_target, of_draft = [], []
            for depth in range(1, count + 1):
                to = int(slots[row.end + depth - 1])
                of_target.append((int(slots[row.end + path[depth] - 1]), to))
                if depth <= winner.emission.num_draft_kept:
                    of_draft.append((int(slots[self.drafter.node_index(row, winner.rank, depth)]), to))
            target_moves.append([move for move in of_target if move[0] != move[1]])
            draft_moves.append([move for move in of_draft if move[0] != move[1]])
        self.target.keep(target_moves)
        self.drafter.keep(draft_moves)
