"""Continuous batching: `plan()` decides a step and takes blocks; only `commit()` appends tokens.

Rows take a step's budget of tokens in this order: decoding rows with the drafts that their requests
fix (while prompts wait, a quarter is left for prompts); chunks of running prompts, without the
tokens held for the controller's drafts; new requests, while seats and blocks suffice; drafts that
the controller chooses once the emitting rows are known, then text drafts.

Decoding rows and prompts go by priority, then by turns of clients, then by the time since their
last row. The queue goes by priority and arrival.

If no block is free for a row, or a queued request finds no seat or blocks while less urgent
ones run, the cheapest sequence of the lowest priority is preempted and recomputed later.
Noise depends on positions only, so an answer with fixed drafts stays the same, and an
adaptive one keeps its distribution.

The number of drafted tokens never depends on drafted tokens, which keeps the output exact.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator

from engine.config import SchedulerConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.control.text_choice import NOTHING, Numbers
from engine.fanout import Fanout, num_nodes
from engine.fixed_edits import SharedEdits
from engine.plan import Emission, Grammar, Plan, Row, StepVerdict
from engine.request import Request
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.draft_prefill import DraftPrefill
from engine.scheduling.outcome import Outcome, write_logprobs
from engine.scheduling.prompts import MOST_SHARING, PromptLimit, shares_of
from engine.scheduling.rows import PlannedRow, fanout_within, in_turn, plan_row, row_of
from engine.scheduling.sequence import Sequence, expendability, urgency
from engine.scheduling.store import BlockStore
from engine.scheduling.text_plan import TextPlanner, text_drafts_depend_on_load

Planned = dict[int, PlannedRow]
"""Rows of a step by sequence, before they are built."""


class Scheduler:
    """Queue, running sequences and block accounting."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockStore | BlockTables,
        eos_token_ids: frozenset[int],
        draft_window: int = 0,
        by_head: bool = False,
    ) -> None:
        """by_head: whether a head drafts."""
        self.config = config
        self.draft_prefill = DraftPrefill(config, draft_window, by_head)
        self.tables = blocks if isinstance(blocks, BlockTables) else BlockTables(blocks)
        self.block_size = self.tables.target.block_size
        self.eos_token_ids = eos_token_ids
        self.controller: Controller | None = None
        """Without it adaptive requests draft their maximum."""
        self.times: StepTimes | None = None
        """Without it only the number of prompt tokens counts."""
        self.text_planner = TextPlanner(config.max_copied_tokens)
        self.last_plan = Plan(())
        self.num_preemptions = 0
        self.num_cache_queries = 0
        self.num_cache_hits = 0
        self._waiting: list[Sequence] = []
        """Sorted by `urgency`, the most urgent first."""
        self._running: dict[int, Sequence] = {}
        self._sequence_ids: dict[str, int] = {}
        self._edits = SharedEdits()
        self._next_id = 0
        self._step = 0
        self._prompt_draft_chunk: int | None = None
        """`draft_chunk` (`plan_row`) of adaptive prompts in this step.

        Fixed before blocks are published: a row may later read more with the
        draft model, never less.
        """
        self._adaptive_nodes = 0
        """Nodes of each adaptive request in this step without a controller."""

    def portion(self, number: int = 0, count: int = 1) -> Scheduler:
        """Return a scheduler with a portion of the blocks, which measurements may overwrite."""
        tables = self.tables.portion(number, count)
        return Scheduler(
            self.config, tables, self.eos_token_ids, self.draft_prefill.draft_window, self.draft_prefill.by_head
        )

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def running(self, sequence_id: int) -> Sequence | None:
        """Return the sequence of a row of the last step; None if it has ended since."""
        return self._running.get(sequence_id)

    def submit(
        self,
        request: Request,
        grammar: Grammar | None = None,
        fixed_draft_distribution: bool = False,
    ) -> None:
        """Queue a request whose length has been checked (`Engine.submit`), with its grammar.

        fixed_draft_distribution: as in `Sequence`.
        """
        assert request.request_id not in self._sequence_ids, request.request_id
        sequence = Sequence(
            sequence_id=self._next_id,
            request=request,
            arrived_s=time.monotonic(),
            grammar=grammar,
            draft_window=self.draft_prefill.draft_window,
            fixed_draft_distribution=fixed_draft_distribution,
            eos_token_ids=self.eos_token_ids,
            edits=self._edits,
            answers=self.text_planner.answers,
            by_head=self.draft_prefill.by_head,
        )
        self._next_id += 1
        self._sequence_ids[request.request_id] = sequence.sequence_id
        insort(self._waiting, sequence, key=urgency)

    def abort(self, request_id: str) -> bool:
        """Remove a request and free its blocks; return False if it is not here (any longer)."""
        sequence_id = self._sequence_ids.pop(request_id, None)
        if sequence_id is None:
            return False
        running = self._running.pop(sequence_id, None)
        if running is not None:
            self.tables.release(running)
        else:
            self._waiting = [s for s in self._waiting if s.sequence_id != sequence_id]
        return True

    def plan(self) -> Plan:
        """Plan the rows of a step within the token budget and the pool."""
        self._step += 1
        self._make_way()
        self._share_draft_reading()
        planned: Planned = {}
        budget = self._plan_texts(planned)
        if self.controller is not None:
            budget = self._plan_drafts(planned, budget, self.controller)
        if self.times is not None:
            self._plan_text_drafts(planned, budget, self.times)
        rows = []
        for row in self._in_place(planned):
            row.sequence.last_step = self._step
            self.tables.keep_states(row)
            rows.append(row_of(row))
        self.last_plan = Plan(tuple(rows))
        return self.last_plan

    def commit(self, plan: Plan, verdict: StepVerdict) -> list[Outcome]:
        """Append emitted tokens, and free ended sequences; `Engine` ends broken sequences."""
        emissions: Iterator[Emission] = iter(verdict.emissions)
        prompts = verdict.prompt_logprobs or ((),) * len(plan.rows)
        outcomes = []
        for row, prompt_logprobs in zip(plan.rows, prompts, strict=True):
            sequence = self._running[row.sequence_id]
            if prompt_logprobs:
                sequence.prompt_logprobs.append(write_logprobs(prompt_logprobs))
            sequence.num_target_computed = row.end
            sequence.num_draft_computed = row.draft_first_index + len(row.draft_input_ids)
            sequence.draft_kv_first = row.draft_kv_first
            self.tables.advance(sequence, row)
            if row.emits:
                emission = next(emissions)
                if row.sequence_id not in verdict.broken:
                    outcomes.append(self._append(sequence, row, emission))
        return outcomes

    def check_invariants(self) -> None:
        """Raise AssertionError if blocks and sequences contradict each other."""
        self.tables.check_invariants(self._running.values())
        holders = [s for s in self._waiting if s.block_ids or s.draft_block_ids]
        assert not holders, "a waiting sequence holds blocks"
        ids = {s.sequence_id for s in self._waiting} | set(self._running)
        assert ids == set(self._sequence_ids.values()), "a request is lost"
        for s in self._running.values():
            assert 0 <= s.num_target_computed < len(s.tokens)
            assert len(s.block_ids) * self.block_size >= s.num_target_computed

    # -- planning known tokens --------------------------------------------------------------------

    def _share_draft_reading(self) -> None:
        """Set how much the draft model reads of texts from which nothing is drafted yet."""
        adaptive = (s for s in self._running.values() if s.request.speculation.adapts_shape)
        self.draft_prefill.share_among(adaptive)
        reads = self.controller is not None and self.controller.reads
        self._prompt_draft_chunk = self.draft_prefill.chunk if reads else None

    def _plan_texts(self, planned: Planned) -> int:
        """Plan all known tokens. Return the tokens that are left for the controller's drafts."""
        decoding = in_turn(s for s in self._running.values() if s.num_missing == 1)
        has_prompts = bool(self._waiting) or len(decoding) < len(self._running)
        budget = self._plan_decoding(planned, decoding, has_prompts)
        prompt_budget = budget - self._held_for_drafts(decoding, budget)
        if planned and self.config.max_prompt_tokens:
            prompt_budget = min(prompt_budget, self.config.max_prompt_tokens)
        held = budget - prompt_budget
        limit = None
        rows = self._in_place(planned)
        if has_prompts and rows and self.times is not None:
            limit = PromptLimit(self.times, len(rows), sum(row.end for row in rows))
        if has_prompts:
            prompt_budget = self._plan_prompts(planned, prompt_budget, limit)
        # Requests admitted now can share the blocks of this step, because a pass writes all K/V
        # before it reads any.
        for row in planned.values():
            self._publish(row)
        return held + self._plan_new(planned, prompt_budget, limit)

    def _plan_decoding(self, planned: Planned, decoding: list[Sequence], has_prompts: bool) -> int:
        """Add the rows that decode, with drafts of fixed shapes; return the tokens left."""
        budget = total = self.config.max_num_batched_tokens
        nodes_left = self.config.max_drafted_nodes or total
        num_adaptive = sum(s.request.speculation.adapts_shape for s in decoding)
        self._adaptive_nodes = nodes_left // max(1, num_adaptive)
        for sequence in decoding:
            reserved = total // 4 if has_prompts and planned else 0
            row = self._plan_row(sequence, budget - reserved)
            is_in_turn = row.num_nodes <= nodes_left or not planned
            if row.emits and is_in_turn and self._reserve(row):
                planned[sequence.sequence_id] = row
                nodes_left -= row.num_nodes
                budget -= row.num_tokens
        return budget

    def _held_for_drafts(self, decoding: list[Sequence], budget: int) -> int:
        """Return the tokens held back from prompts for the controller's present drafts.

        A quarter of the step stays for prompts.
        """
        if self.controller is None:
            return 0
        num_drafts, length = self.controller.shape
        num_adaptive = sum(s.request.speculation.adapts_shape for s in decoding)
        most_held = max(0, budget - self.config.max_num_batched_tokens // 4)
        return min(num_drafts * length * num_adaptive, most_held)

    def _plan_prompts(self, planned: Planned, budget: int, limit: PromptLimit | None) -> int:
        """Add chunks of the running prompts; return the tokens left for waiting requests."""
        prompts = in_turn(s for s in self._running.values() if s.num_missing > 1)
        num_seats = min(self.config.max_num_seqs - len(self._running), MOST_SHARING)
        shares = shares_of([*prompts, *self._waiting[:num_seats]], budget, self._prompt_lag)
        for sequence in prompts:
            if sequence.sequence_id not in self._running:  # preempted for a prompt before it
                continue
            row = self._plan_row(sequence, min(budget, shares[sequence.sequence_id]), limit)
            if row.num_known and self._reserve(row):
                planned[sequence.sequence_id] = row
                budget -= row.num_tokens
                if limit is not None:
                    limit.take(row.first_index, row.num_known)
        return budget

    def _plan_new(self, planned: Planned, budget: int, limit: PromptLimit | None) -> int:
        """Add requests from the queue while they fit; return the tokens left."""
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            row = self._admit(budget, limit)
            if row is None:
                break
            planned[row.sequence.sequence_id] = row
            budget -= row.num_tokens
            if limit is not None and row.sequence.num_missing > 1:
                limit.take(row.first_index, row.num_known)
            self._publish(row)
        return budget

    def _plan_row(
        self,
        sequence: Sequence,
        budget: int,
        limit: PromptLimit | None = None,
    ) -> PlannedRow:
        """Return the row that fits the budget and the prompts' time, but no controller's drafts."""
        is_prompt = sequence.num_missing > 1
        if is_prompt and limit is not None:
            most = min(budget, sequence.num_missing)
            fitting = limit.most(sequence.num_target_computed, most)
            # The drafts after a whole prompt are not limited.
            if fitting < sequence.num_missing:
                budget = min(budget, self._prompt_lag(sequence) + fitting)
        fanout: Fanout = ()
        draft_chunk = None
        if not self._is_adaptive(sequence):
            fanout = fanout_within(sequence.request.speculation, self._adaptive_nodes)
        elif is_prompt:
            draft_chunk = self._prompt_draft_chunk
        return plan_row(sequence, fanout, budget, self._most_fixed_text_nodes(sequence), draft_chunk)

    # -- planning drafts --------------------------------------------------------------------------

    def _plan_drafts(self, planned: Planned, budget: int, controller: Controller) -> int:
        """Add the controller's drafts to the emitting adaptive rows; return the tokens left."""
        rows = self._in_place(planned)
        adaptive = []
        other_fanouts = []
        for row in rows:
            if row.emits and row.sequence.request.speculation.adapts_shape:
                adaptive.append(row)
            elif row.emits:
                other_fanouts.append(row.fanout)
        with_prompts = sum([row.num_known - row.emits for row in rows]) > 0
        controller.choose([row.sequence for row in adaptive], other_fanouts, with_prompts)
        for row in adaptive:
            sequence = row.sequence
            # The last token of an answer is not drafted, so nothing of the shape may remain.
            fanout = controller.fanout(sequence)[: max(0, sequence.num_remaining - 1)]
            draft_chunk = None
            # It decodes plainly while the draft model catches up, and in steps in which prompts
            # make drafts too expensive.
            stays_current = with_prompts and not fanout and controller.reads
            if stays_current or (fanout and self.draft_prefill.is_far(sequence)):
                fanout = ()
                draft_chunk = self.draft_prefill.chunk
            elif not fanout:  # the row stays as planned
                continue
            room = budget + row.num_tokens
            most_text_nodes = self._most_fixed_text_nodes(sequence)
            drafting = plan_row(sequence, fanout, room, most_text_nodes, draft_chunk)
            if drafting.emits and drafting.num_tokens <= room and self.tables.try_allocate(drafting):
                planned[sequence.sequence_id] = drafting
                budget = room - drafting.num_tokens
        return budget

    def _plan_text_drafts(self, planned: Planned, budget: int, times: StepTimes) -> None:
        """Add text drafts to the adaptive rows that emit, if they are worth their time and fit."""
        rows = self._in_place(planned)
        for drafting in self.text_planner.planned(rows, times, self._reached):
            sequence_id = drafting.sequence.sequence_id
            room = budget + planned[sequence_id].num_tokens
            if drafting.num_tokens <= room and self.tables.try_allocate(drafting):
                planned[sequence_id] = drafting
                budget = room - drafting.num_tokens

    def _reached(self, row: PlannedRow) -> Numbers:
        """Return [depths] the probability that a row's drawn drafts are accepted to each depth."""
        if self.controller is None or not row.fanout:
            return NOTHING
        return self.controller.acceptance.reached(row.fanout[0])[: len(row.fanout)]

    def _is_adaptive(self, sequence: Sequence) -> bool:
        """Whether the controller chooses the drawn drafts of a sequence."""
        return self.controller is not None and sequence.request.speculation.adapts_shape

    def _is_resting(self, sequence: Sequence, row: Row) -> bool:
        """Whether the controller has chosen plain decoding for a row, because it is as fast."""
        adapts_shape = sequence.request.speculation.adapts_shape
        return self.controller is not None and self.controller.rests and adapts_shape and not row.fanout

    def _most_fixed_text_nodes(self, sequence: Sequence) -> int:
        """Return the most nodes of its text drafts that do not depend on the load."""
        depends_on_load = self.times is not None and text_drafts_depend_on_load(sequence)
        return 0 if depends_on_load else self.config.max_copied_tokens

    def _prompt_lag(self, sequence: Sequence) -> int:
        """Return the extra tokens that the draft model must read for a row's chunk.

        0 for heads, or if the controller chooses drafts.
        """
        if sequence.by_head or self._is_adaptive(sequence):
            return 0
        return sequence.draft_lag

    # -- blocks and admission ---------------------------------------------------------------------

    def _in_place(self, planned: Planned) -> list[PlannedRow]:
        """Return the rows whose sequences have not been preempted since they were planned."""
        return [row for sequence_id, row in planned.items() if sequence_id in self._running]

    def _publish(self, row: PlannedRow) -> None:
        """Publish, before the pass, the blocks that a row will fill, for other requests."""
        if row.sequence.sequence_id in self._running:
            self.tables.publish(row.sequence, row.end, row.draft_kv_first, row.draft_read_end)
            self.tables.keep_states(row)

    def _reserve(self, row: PlannedRow) -> bool:
        """Allocate a row's blocks, preempting others if needed; False if the row itself is."""
        while row.sequence.sequence_id in self._running:
            if self.tables.try_allocate(row):
                return True
            holders = [s for s in self._running.values() if self.tables.holds_lacking_blocks(s, row)]
            self._preempt(max(holders, key=expendability, default=row.sequence))
        return False

    def _make_way(self) -> None:
        """Preempt sequences for more urgent requests that wait, before any row of the step.

        Later a victim's blocks may be published, and other rows read them.
        """
        for number, urgent in enumerate(self._waiting[:MOST_SHARING]):
            while victim := self._less_urgent(urgent):
                has_seat = len(self._running) + number < self.config.max_num_seqs
                # Blocks for all of them would be too many: they are admitted in order.
                if has_seat and (number or self._has_blocks_for(urgent)):
                    break
                self._preempt(victim)
            else:
                return

    def _less_urgent(self, urgent: Sequence) -> Sequence | None:
        """Return the first victim among the sequences of a lower priority than a waiting one's."""
        victim = max(self._running.values(), key=expendability, default=None)
        if victim is None or victim.request.priority <= urgent.request.priority:
            return None
        return victim

    def _has_blocks_for(self, waiting: Sequence) -> bool:
        """Whether blocks are free for the text of a waiting sequence."""
        self._take_cached(waiting)
        has_blocks = self.tables.has_blocks(waiting, self._num_tokens_to_admit(waiting))
        self._forget(waiting)
        return has_blocks

    def _preempt(self, victim: Sequence) -> None:
        del self._running[victim.sequence_id]
        self._forget(victim)
        insort(self._waiting, victim, key=urgency)
        self.num_preemptions += 1

    def _forget(self, sequence: Sequence) -> None:
        self.tables.release(sequence)
        sequence.forget_computed()

    def _admit(self, budget: int, limit: PromptLimit | None) -> PlannedRow | None:
        """Start the first request of the queue; None if its tokens or its whole text do not fit."""
        sequence = self._waiting[0]
        self._take_cached(sequence)
        row = self._plan_row(sequence, budget, limit)
        if not row.num_known or not self.tables.admit(row, self._num_tokens_to_admit(sequence)):
            self._forget(sequence)
            return None
        self._waiting.pop(0)
        sequence.note_admission(time.monotonic())
        self.num_cache_queries += len(sequence.tokens)
        self.num_cache_hits += sequence.num_target_computed
        self._running[sequence.sequence_id] = sequence
        return row

    def _take_cached(self, sequence: Sequence) -> None:
        """Start after the cached blocks of the text; the last token is always computed."""
        # Logprobs of a prompt need a row of logits for each token, so all tokens are computed.
        if sequence.wants_prompt_logprobs or not sequence.shares_blocks:
            return
        num_with_draft_kv = self.tables.take_cached(sequence)
        drafts = sequence.request.speculation.num_drafts > 0
        if drafts and not self._is_adaptive(sequence):
            num_tokens_with_draft_kv = num_with_draft_kv * self.block_size
            most_tokens = self.draft_prefill.most_cached(sequence, num_tokens_with_draft_kv)
            most_blocks = most_tokens // self.block_size
            self.tables.target.release(sequence.block_ids[most_blocks:])
            sequence.block_ids = sequence.block_ids[:most_blocks]
        num_with_draft_kv = self.tables.start_from_states(sequence, num_with_draft_kv)
        num_blocks = len(sequence.block_ids)
        if drafts:
            sequence.num_draft_computed = min(num_with_draft_kv, num_blocks) * self.block_size
        sequence.num_target_computed = num_blocks * self.block_size
        sequence.num_published_blocks = num_blocks
        sequence.num_blocks_with_draft_kv = num_with_draft_kv

    def _num_tokens_to_admit(self, sequence: Sequence) -> int:
        """Return the number of tokens for which blocks must be free before a sequence starts."""
        num_text = len(sequence.tokens) + num_nodes(sequence.request.speculation.fanout)
        if sequence.text_draft_finder:
            num_text += self.config.max_copied_tokens
        return num_text

    # -- committing -------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, row: Row, emission: Emission) -> Outcome:
        num_accepted = len(emission.accepted)
        sequence.num_target_computed += num_accepted
        if not sequence.by_head:
            sequence.num_draft_computed += emission.num_draft_kept
        is_adaptive = row.speculation.adaptive and bool(row.fanout)
        # An accepted text draft shows nothing about the drawn drafts.
        learns = is_adaptive and not any(part.num_accepted for part in emission.text_draft_counts)
        if self.controller is not None and learns:
            self.controller.observe(row.fanout[0], row.draft_length, num_accepted)
        token_ids, finish_reason = sequence.cut([*emission.accepted, emission.next_token])
        self.text_planner.learn(sequence, token_ids)
        prompt_logprobs = sequence.prompt_logprobs if sequence.wants_prompt_logprobs else []
        num_predicted = sequence.text_draft_finder.num_predicted(sequence.tokens, token_ids)
        # The statements above need the text before these tokens.
        sequence.tokens += token_ids
        # The last token's K/V is computed in the next step, even if it is an accepted draft.
        last = len(sequence.tokens) - 1
        sequence.num_target_computed = min(sequence.num_target_computed, last)
        sequence.num_draft_computed = min(sequence.num_draft_computed, last)
        sequence.shifts = emission.shifts
        if finish_reason is not None:
            self._finish(sequence)
        return Outcome(
            request_id=sequence.request.request_id,
            token_ids=token_ids,
            finish_reason=finish_reason,
            draft_length=row.longest_chain,
            num_chains=row.num_drafts + len(row.text_drafts),
            text_draft_counts=list(emission.text_draft_counts),
            num_predicted=num_predicted,
            rule=row.speculation.rule,
            num_nodes=emission.num_nodes,
            num_accepted=min(num_accepted, len(token_ids)),
            num_cached=sequence.num_cached,
            queue_s=sequence.queue_s,
            reading_s=sequence.take_reading(),
            logprobs=list(emission.logprobs[: len(token_ids)]),
            prompt_logprobs=prompt_logprobs,
            gap=emission.gap,
            bias=emission.bias,
            drafts=emission.chains,
            rests=self._is_resting(sequence, row),
        )

    def _finish(self, sequence: Sequence) -> None:
        if self.controller is not None and sequence.request.speculation.adapts_shape:
            num_read = self.draft_prefill.to_read(sequence)
            self.controller.acceptance.note_answer(num_read, sequence.num_emitted)
        self.text_planner.answers.add(sequence.request, sequence.tokens[sequence.num_prompt :])
        self.tables.publish(
            sequence,
            sequence.num_target_computed,
            sequence.draft_kv_first,
            sequence.num_draft_computed,
        )
        del self._running[sequence.sequence_id]
        del self._sequence_ids[sequence.request.request_id]
        self.tables.release(sequence)
