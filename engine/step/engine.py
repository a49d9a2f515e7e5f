"""`Engine.step`, the table of contents of the project: it connects the parts.

It contains no algorithm. Requests are checked when submitted. One thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.tensors import node_moves, slot_moves
from engine.config import EngineFacts, SpeculationConfig
from engine.drafting.draft import Draft
from engine.drafting.drafter import Drafter
from engine.errors import RequestError
from engine.grammar.grammar import GrammarClient, GrammarPool
from engine.grammar.grammar_queue import GrammarQueue
from engine.grammar.thinking import ThinkingGrammar
from engine.models.runner import ModelRunner
from engine.plan import Emission, Grammar, Plan, Row, StepVerdict
from engine.request import Request
from engine.sampling.edits import MASKED, has_dead_end
from engine.scheduling.outcome import Outcome, StepStats
from engine.scheduling.request_checks import check_requests
from engine.scheduling.scheduler import Scheduler
from engine.speculation.conditions import FIXED_DISTRIBUTION
from engine.step.eager import EagerStep, RecordedMenu, Step
from engine.step.report import report, split_prompts
from engine.step.results import BROKEN
from engine.step.telemetry import MeasuredStep, Telemetry

Failures = Sequence[tuple[str, RequestError]]
"""Ids of requests that ended with an error."""

_GRAMMARS_PER_SEAT = 2
"""Followed grammars per seat: those of running requests and of as many waiting ones."""


@dataclass
class StepResult:
    """Results and times of a step."""

    outcomes: list[Outcome]
    failed: Failures
    measured: MeasuredStep
    telemetry: Telemetry
    _stats: StepStats | None = None

    def learn(self) -> StepStats:
        """Let the model of step times learn from the step; return the statistics of the step.

        The first call must come before the next step is committed. Later calls return the same.
        """
        if self._stats is None:
            self._stats = self.telemetry.learn(self.measured)
        return self._stats

    @property
    def stats(self) -> StepStats:
        """Return the state after the step, and its times, which have been learned from."""
        assert self._stats is not None, "the model of step times has not learned from this step"
        return self._stats


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
        self.unrecorded = EagerStep(target, drafter)
        """Step for plans without a recorded step: a `CpuStep` on most CPUs."""
        self.recorded = RecordedMenu()
        self.works_meanwhile = target.device.type != "cpu"
        """Whether passes run on a device while this thread goes on."""
        self._ended: list[tuple[str, RequestError]] = []
        """Requests that could not continue in this step."""

    def with_scheduler(self, scheduler: Scheduler) -> Engine:
        """Return another engine of the same models and steps."""
        source = self.grammar_queue.source
        engine = Engine(self.target, self.drafter, scheduler, self.facts, self.limits, source)
        engine.unrecorded = self.unrecorded
        engine.recorded = self.recorded
        return engine

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[Outcome]:
        """Advance every planned sequence, sampling rows by a token or more.

        meanwhile: see `run_step`.
        """
        plan = self.scheduler.plan()  # rows, token counts and blocks
        verdict = self.carry_out(plan, meanwhile)
        outcomes = self.scheduler.commit(plan, verdict)  # append, finish, free
        self._end_broken(verdict)
        self._end_masked(plan, verdict, outcomes)
        return outcomes

    @torch.inference_mode()
    def carry_out(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepVerdict:
        """Carry out a plan of the scheduler, or of a measurement, on the device.

        meanwhile: see `run_step`.
        """
        step = self.step_for(plan)
        phase = self.telemetry.phase
        with phase("draft"):  # chains, and the distribution of each drafted token
            draft = step.draw(plan)
        with phase("target"):  # one pass over every drafted node
            logits_NV = step.forward(plan, draft)
        if meanwhile is not None:
            meanwhile()
        logits = split_prompts(plan, draft, logits_NV)
        with phase("verify"):  # distributions of the target, and the exact rule of each request
            verdict = step.verify(plan, draft, logits.node_NV)
        with phase("keep"):  # move the K/V of accepted paths to the end of the text
            self._compact(plan, draft, verdict.emissions)
        observed_share = self.limits.observed_share
        return report(plan, draft, logits, verdict, self.telemetry.num_steps, observed_share)

    def _compact(self, plan: Plan, draft: Draft | None, emissions: Sequence[Emission]) -> None:
        """Make the K/V of accepted paths contiguous in the caches of target and drafter."""
        accepted = target_moves(plan, draft, emissions)
        if accepted:
            size = self.facts.block_size
            moves = [slot_moves(pairs, row.block_ids, size) for row, pairs in accepted]
            nodes = [move for row, pairs in accepted for move in node_moves(pairs, row.end, row.state)]
            self.target.keep(moves, nodes)
        if self.drafter is not None:
            self.drafter.keep(plan, emissions)

    def step_for(self, plan: Plan) -> Step:
        """Return the recorded step that has room for a plan, or else the step for any plan."""
        return self.recorded.find(plan) or self.unrecorded

    def run_step(self, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Run one step and measure it.

        meanwhile: called between the launch of the target's pass and the wait for its results. It
        may submit requests. It must not abort any, because the device still writes the blocks of
        the step's requests. It must call `learn` of the last result. Without `meanwhile`, the
        returned result has been learned from.
        """
        self.telemetry.stopwatch.start()
        outcomes = self.step(meanwhile)
        self._end_followed(outcomes)
        failed = self._ended
        self._ended = []
        failed_ids = {request_id for request_id, _ in failed}
        delivered = [outcome for outcome in outcomes if outcome.request_id not in failed_ids]
        measured = self.telemetry.end_step(self.grammar_queue.num_waiting)
        result = StepResult(delivered, failed, measured, self.telemetry)
        if meanwhile is None:
            result.learn()
        return result

    @property
    def draft_runner(self) -> ModelRunner | None:
        """Runner of the draft model; None if there is none."""
        return self.drafter.runner if self.drafter is not None else None

    def stats(self) -> StepStats:
        """Return the state between steps."""
        return self.telemetry.stats(self.grammar_queue.num_waiting)

    def submit(self, *requests: Request) -> None:
        """Queue requests.

        Raises RequestError if a request cannot be served as asked, and then queues no request.
        """
        check_requests(requests, self.facts, self.limits)
        for request in requests:
            if request.sampling.grammar:
                self.grammar_queue.add(request)
            else:
                self.queue(request)

    def queue_followed(self) -> tuple[list[str], Failures]:
        """Queue the requests whose grammars are ready.

        Returns (ids of the queued requests, requests whose grammars cannot be followed).
        """
        ready, failed = self.grammar_queue.ready()
        for request, grammar in ready:
            self.queue(request, grammar)
        return [request.request_id for request, _ in ready], failed

    def queue(self, request: Request, client: GrammarClient | None = None) -> None:
        """Queue a request that is known to be valid; client: follows its grammar."""
        grammar: Grammar | None = client
        thinking = request.sampling.thinking
        if thinking is not None:
            grammar = ThinkingGrammar(thinking, self.facts, client)
        speculation = request.speculation
        rules = self.facts.rules
        drafts = bool(speculation.num_drafts)
        is_fixed = drafts and FIXED_DISTRIBUTION in rules[speculation.rule].needs
        self.scheduler.submit(request, grammar, is_fixed)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False if it has already ended."""
        is_known = self.grammar_queue.end(request_id) or self.scheduler.abort(request_id)
        if not self.scheduler.has_work:
            self.telemetry.pause()
        return is_known

    def _end_broken(self, verdict: StepVerdict) -> None:
        """End the requests with non-finite numbers; wipe their K/V before the blocks are reused.

        A block that another request holds is not wiped: if its K/V were wrong, that request would
        end, too. No new request gets such a block from the prefix cache.
        """
        if not verdict.broken:
            return
        tables = self.scheduler.tables
        running = map(self.scheduler.running, verdict.broken)
        sequences = [sequence for sequence in running if sequence is not None]
        blocks = tables.blocks_of(sequences)
        for sequence in sequences:
            tables.forget_states(sequence)
            self._end(sequence.request.request_id, BROKEN)
        free, draft_free = tables.forget(*blocks)
        self.target.wipe(free)
        if self.draft_runner is not None:
            self.draft_runner.wipe(draft_free)

    def _end_masked(self, plan: Plan, verdict: StepVerdict, outcomes: Sequence[Outcome]) -> None:
        """End the requests that emitted a token although their masks allowed no token.

        The token is not sent. If a grammar fails for the tokens, `_end_followed` ends its request.
        """
        # A broken row has no outcome.
        rows = [row for row in plan.sampling_rows if row.sequence_id not in verdict.broken]
        emitted = [
            (row.request_id, row.text, outcome.token_ids)
            for row, outcome in zip(rows, outcomes, strict=True)
            if row.text is not None
        ]
        for _, text, tokens in emitted:
            if text.grammar is not None:
                text.grammar.check_answer(tokens)
        failed = {request_id for request_id, _ in self.grammar_queue.failed()}
        for request_id, text, tokens in emitted:
            if request_id in failed:
                continue
            leaves_thoughts = isinstance(text.grammar, ThinkingGrammar) and not text.grammar.allows(tokens)
            if leaves_thoughts or has_dead_end(text, tokens, self.facts.vocab_size):
                self._end(request_id, MASKED)

    def _end(self, request_id: str, error: RequestError) -> None:
        self._ended.append((request_id, error))
        self.abort(request_id)

    def _end_followed(self, outcomes: Sequence[Outcome]) -> None:
        """End the requests whose grammars failed in this step; release ended requests' grammars."""
        for request_id, error in self.grammar_queue.failed():
            self._end(request_id, error)
        for outcome in outcomes:
            if outcome.finish_reason is not None:
                self.grammar_queue.end(outcome.request_id)


def target_moves(
    plan: Plan, draft: Draft | None, emissions: Sequence[Emission]
) -> list[tuple[Row, list[tuple[int, int]]]]:
    """Return the moves from index to index that make accepted paths contiguous, by row."""
    if draft is None:
        return []
    moves = []
    for row, tree, emission in zip(plan.sampling_rows, draft.trees, emissions, strict=True):
        if emission.rank == 0 or not emission.accepted:  # the first chain's nodes are in place
            continue
        path = tree.paths[emission.rank][1 : len(emission.accepted) + 1]
        moves.append((row, [(row.end + node - 1, row.end + depth) for depth, node in enumerate(path)]))
    return moves
