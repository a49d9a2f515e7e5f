"""`Engine.step`: the table of contents of the project.

It contains no algorithm. It connects the parts, and checks requests when they are submitted. One thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.attention.tensors import slot_moves
from engine.config import EngineFacts, SpeculationConfig
from engine.drafting.draft import Draft
from engine.drafting.drafter import Drafter
from engine.errors import RequestError
from engine.grammar.grammar import GrammarClient, GrammarPool
from engine.grammar.grammar_queue import GrammarQueue
from engine.grammar.thinking import ThinkingGrammar
from engine.kernels.protocol import KVMoves
from engine.models.runner import ModelRunner
from engine.plan import Emission, Plan, StepVerdict
from engine.request import Request
from engine.sampling.edits import MASKED, has_dead_end
from engine.scheduling.outcome import Outcome, StepStats
from engine.scheduling.request_checks import check_requests
from engine.scheduling.scheduler import Scheduler
from engine.speculation.conditions import FIXED_DISTRIBUTION
from engine.step.eager import EagerStep, RecordedMenu, Step
from engine.step.report import BROKEN, report, split_prompts
from engine.step.telemetry import Telemetry

Failures = Sequence[tuple[str, RequestError]]
"""Requests (by id) that have ended with an error."""

_GRAMMARS_PER_SEAT = 2
"""Grammars are followed for the requests that run, and for the same number of the next ones."""


@dataclass(frozen=True)
class StepResult:
    """Results and times of a step."""

    outcomes: list[Outcome]
    learn: Callable[[], StepStats]
    """Rest of `Telemetry.end_step`."""
    failed: Failures = ()
    """Requests that could not continue."""

    @cached_property
    def stats(self) -> StepStats:
        """Return the state after the step, and its times; the first call learns from them."""
        return self.learn()


class Engine:
    """Target, drafter and scheduler as one machine that advances in steps."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        scheduler: Scheduler,
        facts: EngineFacts,
        limits: SpeculationConfig,
        grammars: GrammarPool,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.scheduler = scheduler
        self.facts = facts
        self.limits = limits
        num_followed = _GRAMMARS_PER_SEAT * scheduler.config.max_num_seqs
        self.grammar_queue = GrammarQueue(grammars, num_followed)
        self.telemetry = Telemetry(scheduler, target.device)
        self.eager = EagerStep(target, drafter)
        """Takes the plans that no recorded step has room for."""
        self.recorded = RecordedMenu()
        self.works_meanwhile = target.device.type != "cpu"
        """Whether a step's passes run on a device while this thread does something else."""
        self._meanwhile: Callable[[], None] | None = None
        self._ended: list[tuple[str, RequestError]] = []
        """Requests that could not continue in this step."""

    def step(self) -> list[Outcome]:
        """Advance every planned sequence: sampling rows by at least one token, other rows by a prompt chunk."""
        plan = self.scheduler.plan()  # rows, token counts and blocks
        with self.telemetry.phase("parts"):
            verdict = self.carry_out(plan)
        outcomes = self.scheduler.commit(plan, verdict)  # append, finish, free
        self._end_broken(verdict)
        self._end_masked(plan, verdict, outcomes)
        return outcomes

    @torch.inference_mode()
    def carry_out(self, plan: Plan) -> StepVerdict:
        """Carry out a plan on the device; the scheduler makes plans, and so do measurements."""
        step, phase = self.step_for(plan), self.telemetry.phase
        self.telemetry.is_eager = step is self.eager
        with phase("draft"):  # chains, and the distribution of each drafted token
            draft = step.draw(plan)
        with phase("target"):  # one pass over every drafted node
            logits_NV = step.forward(plan, draft)
        if self._meanwhile is not None:
            self._meanwhile()
        prompt_NV, logits_NV = split_prompts(plan, draft, logits_NV)
        with phase("verify"):  # distributions of the target, and the exact rule of each request
            verdict = step.verify(plan, draft, logits_NV)
        with phase("keep"):  # move the K/V of accepted paths to the end of the text
            if any(moves := target_moves(plan, draft, verdict.emissions, self.facts.block_size)):
                self.target.keep(moves)
            if self.drafter is not None:
                self.drafter.keep(plan, verdict.emissions)
        return report(plan, draft, prompt_NV, logits_NV, verdict, self.telemetry.num_steps, self.limits.observed_share)

    def step_for(self, plan: Plan) -> Step:
        """Return the recorded step that has room for a plan, or else the eager one."""
        return self.recorded.find(plan) or self.eager

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Run one step and measure it.

        meanwhile: work between the launch of the target's pass and the wait for its results. It may submit requests,
        but not abort any: those of this step hold blocks that the device writes. It must read the last result's
        `stats`, because they learn from that step.
        """
        self.telemetry.stopwatch.start()
        self._meanwhile = meanwhile
        try:
            outcomes = self.step()
        finally:
            self._meanwhile = None
        self._end_followed(outcomes)
        failed, self._ended = self._ended, []
        learn = self.telemetry.end_step(self.grammar_queue.num_waiting)
        gone = {request_id for request_id, _ in failed}
        result = StepResult([outcome for outcome in outcomes if outcome.request_id not in gone], learn, failed)
        if meanwhile is None:
            result.stats  # noqa: B018 (learns)
        return result

    @property
    def draft_runner(self) -> ModelRunner | None:
        """Runner of the draft model; None if there is none."""
        return self.drafter.runner if self.drafter is not None else None

    def stats(self) -> StepStats:
        """Return the state between steps."""
        return self.telemetry.stats(self.grammar_queue.num_waiting)

    def submit(self, *requests: Request) -> None:
        """Queue requests; raises RequestError if one cannot be served as asked, and then queues none."""
        check_requests(requests, self.facts, self.limits)
        for request in requests:
            if request.sampling.grammar:
                self.grammar_queue.add(request)
            else:
                self.queue(request)

    def queue_followed(self) -> tuple[list[str], Failures]:
        """Queue the requests whose grammars are ready; return (their ids, those whose grammars cannot be followed)."""
        ready, failed = self.grammar_queue.ready()
        for request, grammar in ready:
            self.queue(request, grammar)
        return [request.request_id for request, _ in ready], failed

    def queue(self, request: Request, client: GrammarClient | None = None) -> None:
        """Queue a request that is known to be valid; client: follows its grammar."""
        speculation, thinking = request.speculation, request.sampling.thinking
        grammar = client if thinking is None else ThinkingGrammar(thinking, self.facts, client)
        drafts = bool(speculation.num_drafts)
        is_fixed = drafts and FIXED_DISTRIBUTION in self.facts.rules[speculation.rule].needs
        self.scheduler.submit(request, grammar, is_fixed)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False if it has already ended."""
        is_known = self.grammar_queue.end(request_id) or self.scheduler.abort(request_id)
        if not self.scheduler.has_work:
            self.telemetry.pause()
        return is_known

    def _end_broken(self, verdict: StepVerdict) -> None:
        """End the requests with non-finite numbers, and wipe their K/V before others get its blocks.

        A block that another request holds is not wiped: if its K/V were wrong, that request would end, too. No new
        request gets such a block from the prefix cache.
        """
        if not verdict.broken:
            return
        tables = self.scheduler.tables
        sequences = [one for one in map(self.scheduler.running, verdict.broken) if one is not None]
        blocks = tables.blocks_of(sequences)
        for sequence in sequences:
            self._end(sequence.request.request_id, BROKEN)
        free, draft_free = tables.forget(*blocks)
        self.target.wipe(free)
        if self.draft_runner is not None:
            self.draft_runner.wipe(draft_free)

    def _end_masked(self, plan: Plan, verdict: StepVerdict, outcomes: Sequence[Outcome]) -> None:
        """End the requests that emitted a token although their masks allowed none; it is not sent. Grammars check what
        was emitted, too.
        """
        rows = [row for row in plan.sampling_rows if row.sequence_id not in verdict.broken]
        for row, outcome in zip(rows, outcomes, strict=True):
            if (text := row.text) is None:
                continue
            if text.grammar is not None:
                text.grammar.check_answer(outcome.token_ids)
            in_thoughts = isinstance(text.grammar, ThinkingGrammar) and not text.grammar.allows(outcome.token_ids)
            if in_thoughts or has_dead_end(text, outcome.token_ids, self.facts.vocab_size):
                self._end(row.request_id, MASKED)

    def _end(self, request_id: str, error: RequestError) -> None:
        self._ended.append((request_id, error))
        self.abort(request_id)

    def _end_followed(self, outcomes: Sequence[Outcome]) -> None:
        """End the requests whose grammars failed in this step, and stop following those that have ended."""
        for request_id, error in self.grammar_queue.failed():
            self._end(request_id, error)
        for outcome in outcomes:
            if outcome.finish_reason is not None:
                self.grammar_queue.end(outcome.request_id)


def target_moves(plan: Plan, draft: Draft | None, emissions: Sequence[Emission], block_size: int) -> list[KVMoves]:
    """Return the moves that make the target's K/V of accepted paths contiguous, by row."""
    if draft is None:
        return []
    moves: list[KVMoves] = []
    for row, tree, emission in zip(plan.sampling_rows, draft.trees, emissions, strict=True):
        if emission.rank == 0 or not emission.accepted:  # the first chain's nodes are in place
            moves.append([])
            continue
        path = tree.paths[emission.rank][1 : len(emission.accepted) + 1]
        pairs = [(row.end + node - 1, row.end + depth) for depth, node in enumerate(path)]
        moves.append(slot_moves(pairs, row.block_ids, block_size))
    return moves
