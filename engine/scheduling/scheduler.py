"""Continuous batching: `plan()` decides a step and takes its blocks; only `commit()` appends tokens to sequences.

A step has a budget of tokens. Decoding rows come before prompts, so a long prompt is cut into chunks that are computed
while others decode. Both go by priority, then by the time since the last row; the queue goes by priority and arrival.
If the pool has no free block for a row, the sequence of the lowest priority that loses least is preempted: it returns
to the queue and is recomputed later, with the same output (its noise depends on positions only).

The number of tokens that a row drafts is fixed by its request, or chosen by the controller once the emitting rows are
known. It never depends on the drafted tokens, which keeps the output exact. If the request fixes it, the answer does
not depend on the load."""

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
from engine.scheduling.text_plan import TextPlanner, weighs_text_drafts


class Scheduler:
    """Queue, running sequences and block accounting."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockStore,
        eos_token_ids: frozenset[int],
        draft_window: int = 0,
        by_head: bool = False,
        draft_blocks: BlockStore | None = None,
    ) -> None:
        """draft_blocks: of the draft model's K/V, if a draft window bounds it; None if it is in the same blocks."""
        self.config = config
        self.draft_prefill = DraftPrefill(config, draft_window, by_head)
        self.tables = BlockTables(blocks, draft_blocks)
        self.block_size = blocks.block_size
        self.eos_token_ids = eos_token_ids
        self.controller: Controller | None = None
        """Set once costs have been measured; without it adaptive requests draft their maximum."""
        self.times: StepTimes | None = None
        """Set once costs have been measured; without it only the number of prompt tokens is limited."""
        self.text_planner = TextPlanner(config.max_copied_tokens)
        self.num_preemptions = 0
        self.num_cache_queries = 0
        """Tokens of all admitted texts."""
        self.num_cache_hits = 0
        """Tokens of admitted texts with K/V in the prefix cache."""
        self._waiting: list[Sequence] = []
        """Sorted by `urgency`, the most urgent first."""
        self._running: dict[int, Sequence] = {}
        self._sequence_ids: dict[str, int] = {}
        self._edits = SharedEdits()
        self.last_plan = Plan(())
        self._prompt_draft_chunk = 0
        """The `draft_chunk` (see `plan_row`) of adaptive prompts in this step. It is set before the controller chooses,
        because by then `_publish` has promised other requests the draft K/V of these blocks."""
        self._adaptive_nodes = config.max_drafted_nodes or config.max_num_batched_tokens
        """Nodes that each adaptive request may draft in this step without a controller."""
        self._next_id = self._step = 0

    def portion(self, number: int = 0, count: int = 1) -> Scheduler:
        """Return a new scheduler of one of `count` equal portions of the blocks, for measurements that write over
        their content.
        """
        blocks, draft_blocks = self.tables.portion(number, count)
        window, by_head = self.draft_prefill.draft_window, self.draft_prefill.by_head
        return Scheduler(self.config, blocks, self.eos_token_ids, window, by_head, draft_blocks)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Return the number of requests that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def running(self, sequence_id: int) -> Sequence | None:
        """Return the sequence of a row of the last step; None if it has ended since."""
        return self._running.get(sequence_id)

    def submit(self, request: Request, grammar: Grammar | None = None, fixed_draft_distribution: bool = False) -> None:
        """Queue a request whose length has been checked (`Engine.submit`), with its grammar.

        fixed_draft_distribution: as in `Sequence`."""
        assert request.request_id not in self._sequence_ids, request.request_id
        window, by_head = self.draft_prefill.draft_window, self.draft_prefill.by_head
        sequence = Sequence(
            self._next_id,
            request,
            time.monotonic(),
            grammar,
            window,
            fixed_draft_distribution,
            self.eos_token_ids,
            self._edits,
            self.text_planner.answers,
            by_head,
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
        """Plan this step's rows within the token budget and the pool: first sequences, then their drafts."""
        self._step += 1
        self.draft_prefill.share_among(s for s in self._running.values() if s.request.speculation.adapts_shape)
        reads = self.controller is not None and self.controller.reads
        self._prompt_draft_chunk = self.draft_prefill.chunk if reads else 0
        parts: dict[int, PlannedRow] = {}
        budget = self._plan_texts(parts)
        if self.controller is not None:
            budget = self._plan_drafts(parts, budget)
        if self.times is not None:
            self._plan_text_drafts(parts, budget, self.times)
        rows = []
        for part in self._in_place(parts):
            part.sequence.last_step = self._step
            rows.append(row_of(part))
        self.last_plan = Plan(tuple(rows))
        return self.last_plan

    def _plan_texts(self, parts: dict[int, PlannedRow]) -> int:
        """Plan known tokens of decoding rows, running prompts and new requests, and drafts of fixed shapes. Return the
        tokens left for drafts that the controller chooses; prompts leave it those `held` for the current shape."""
        total = budget = self.config.max_num_batched_tokens
        decoding = in_turn(s for s in self._running.values() if s.num_missing == 1)
        prompts_wait = bool(self._waiting) or len(decoding) < len(self._running)
        nodes_left = self.config.max_drafted_nodes or total
        self._adaptive_nodes = nodes_left // max(1, sum(s.request.speculation.adapts_shape for s in decoding))
        for sequence in decoding:
            reserved = total // 4 if prompts_wait and parts else 0
            part = self._part(sequence, budget - reserved)
            is_in_turn = part.num_nodes <= nodes_left or not parts
            if part.emits and is_in_turn and self._reserve(part):
                nodes_left -= part.num_nodes
                parts[sequence.sequence_id] = part
                budget -= part.num_tokens
        held = min(self._usual_drafts(decoding), max(0, budget - total // 4))
        if parts and self.config.max_prompt_tokens:
            held = max(held, budget - self.config.max_prompt_tokens)
        limit = None
        if parts and self.times is not None and prompts_wait:
            limit = PromptLimit(self.times, len(parts), sum(part.end for part in parts.values()))
        budget = self._plan_prompts(parts, budget - held, limit) if prompts_wait else budget - held
        # Requests admitted now can share the blocks of this step, because a pass writes all K/V before it reads any.
        for part in parts.values():
            self._publish(part)
        while (admitted := self._admit(budget, limit)) is not None:
            parts[admitted.sequence.sequence_id] = admitted
            budget -= admitted.num_tokens
            self._publish(admitted)
        return held + budget

    def _plan_prompts(self, parts: dict[int, PlannedRow], budget: int, limit: PromptLimit | None) -> int:
        """Add chunks of the running prompts; return the tokens left for waiting requests."""
        prompts = in_turn(s for s in self._running.values() if s.num_missing > 1)
        num_seats = min(self.config.max_num_seqs - len(self._running), MOST_SHARING)
        shares = shares_of([*prompts, *self._waiting[:num_seats]], budget, self._lag)
        for sequence in prompts:
            part = self._part(sequence, min(budget, shares[sequence.sequence_id]), limit)
            if part.num_known and self._reserve(part):
                parts[sequence.sequence_id] = part
                budget -= part.num_tokens
        return budget

    def _plan_drafts(self, parts: dict[int, PlannedRow], budget: int) -> int:
        """Let the controller decide about the adaptive rows that emit, and add their drafts if they fit. Return the
        tokens that are left.
        """
        assert self.controller is not None
        emitting = [part for part in self._in_place(parts) if part.emits]
        adaptive = [part for part in emitting if self._controller_of(part.sequence) is not None]
        others = [part for part in emitting if self._controller_of(part.sequence) is None]
        self.controller.choose(
            [part.sequence for part in adaptive],
            [part.fanout for part in others],
            [self.draft_prefill.lag(part.sequence) for part in adaptive],
            sum(part.end for part in others),
            any(part.needs for part in emitting),
        )
        drafts = self.controller.drafts_with_prompt(sum(part.num_known - part.emits for part in parts.values()))
        for part in adaptive:
            # The last token of an answer is not drafted, so nothing of the shape may remain.
            fanout, draft_chunk = self.controller.fanout(part.sequence)[: max(0, part.sequence.num_remaining - 1)], 0
            if fanout and (not drafts or self.draft_prefill.is_far(part.sequence)):
                fanout, draft_chunk = (), self.draft_prefill.chunk
            elif not fanout and part.num_known > 1:
                draft_chunk = self._prompt_draft_chunk
            if not (fanout or draft_chunk):  # as planned
                continue
            room = budget + part.num_tokens
            found = plan_row(part.sequence, fanout, room, self._most_unweighed(part.sequence), draft_chunk)
            if found.emits and found.num_tokens <= room and self.tables.find(found):
                parts[part.sequence.sequence_id] = found
                budget = room - found.num_tokens
        return budget

    def _plan_text_drafts(self, parts: dict[int, PlannedRow], budget: int, times: StepTimes) -> None:
        """Add text drafts to the adaptive rows that emit, if they are worth their time and fit."""
        for found in self.text_planner.planned(self._in_place(parts), times, self._reached):
            sequence_id = found.sequence.sequence_id
            room = budget + parts[sequence_id].num_tokens
            if found.num_tokens <= room and self.tables.find(found):
                parts[sequence_id] = found
                budget = room - found.num_tokens

    def _reached(self, part: PlannedRow) -> Numbers:
        """Return [depths] the probability that a part's drawn drafts are accepted to each depth and beyond."""
        if self.controller is None or not part.fanout:
            return NOTHING
        return self.controller.reached(part.sequence, part.fanout)

    def _usual_drafts(self, decoding: list[Sequence]) -> int:
        """Return the number of tokens that the adaptive sequences would draft now."""
        if self.controller is None:
            return 0
        num_drafts, length = self.controller.choice.shape
        return num_drafts * length * sum(s.request.speculation.adapts_shape for s in decoding)

    def _in_place(self, parts: dict[int, PlannedRow]) -> list[PlannedRow]:
        """Return the parts whose sequences still hold their blocks, which a more urgent one may have taken."""
        return [part for sequence_id, part in parts.items() if sequence_id in self._running]

    def commit(self, plan: Plan, verdict: StepVerdict) -> list[Outcome]:
        """Append emitted tokens, cut at the end of the answer, and free ended sequences. `Engine` ends broken ones."""
        emissions: Iterator[Emission] = iter(verdict.emissions)
        prompts = verdict.prompt_logprobs or ((),) * len(plan.rows)
        outcomes = []
        for row, prompt_logprobs in zip(plan.rows, prompts, strict=True):
            sequence = self._running[row.sequence_id]
            if prompt_logprobs:
                sequence.prompt_logprobs.append(write_logprobs(prompt_logprobs))
            sequence.num_target_computed = row.end
            sequence.num_draft_computed = row.draft_first_index + len(row.draft_input_ids)
            sequence.draft_start = row.draft_start
            if row.emits:
                emission = next(emissions)
                if row.sequence_id not in verdict.broken:
                    outcomes.append(self._append(sequence, row, emission))
        return outcomes

    def check_invariants(self) -> None:
        """Raise AssertionError if blocks and sequences contradict each other."""
        self.tables.check_invariants(self._running.values())
        assert not any(s.block_ids or s.draft_block_ids for s in self._waiting), "a waiting sequence holds blocks"
        ids = {s.sequence_id for s in self._waiting} | set(self._running)
        assert ids == set(self._sequence_ids.values()), "a request is lost"
        for s in self._running.values():
            assert 0 <= s.num_target_computed < len(s.tokens)
            assert len(s.block_ids) * self.block_size >= s.num_target_computed

    # -- planning ---------------------------------------------------------------------------

    def _part(self, sequence: Sequence, budget: int, limit: PromptLimit | None = None) -> PlannedRow:
        """Return the part that fits the budget and the time of prompts; no drafts if the controller decides on them."""
        is_prompt, first = sequence.num_missing > 1, sequence.num_target_computed
        is_adaptive = self._controller_of(sequence) is not None
        if is_prompt and limit is not None:
            fitting = limit.most(first, min(budget, sequence.num_missing))
            if fitting < sequence.num_missing:  # else its drafts, which are not limited, may follow the whole prompt
                budget = min(budget, self._lag(sequence) + fitting)
        fanout: Fanout = ()
        draft_chunk = 0
        if not is_adaptive:
            fanout = fanout_within(sequence.request.speculation, self._adaptive_nodes)
        elif is_prompt:
            draft_chunk = self._prompt_draft_chunk
        part = plan_row(sequence, fanout, budget, self._most_unweighed(sequence), draft_chunk)
        if is_prompt and limit is not None:
            limit.take(first, part.num_known)
        return part

    def _most_unweighed(self, sequence: Sequence) -> int:
        """Return the most nodes of its text drafts that are a function of its text, whatever the load is."""
        is_weighed = self.times is not None and weighs_text_drafts(sequence)
        return 0 if is_weighed else self.config.max_copied_tokens

    def _lag(self, sequence: Sequence) -> int:
        """Return the lag that a step makes up together with the target; 0 for heads, or if the controller chooses."""
        is_bounded = not sequence.by_head and self._controller_of(sequence) is None
        return self.draft_prefill.lag(sequence) if is_bounded else 0

    def _controller_of(self, sequence: Sequence) -> Controller | None:
        """Return the controller that chooses its drawn drafts; None if its request does, or draws none."""
        return self.controller if sequence.request.speculation.adapts_shape else None

    def _take_cached(self, sequence: Sequence) -> None:
        """Start after the cached part of the text; the last token is always computed."""
        if sequence.wants_prompt_logprobs or not sequence.shares_blocks:
            return  # all is computed: logprobs of a prompt need a row of logits for each token
        num_drafted = self.tables.take_known(sequence)
        if sequence.request.speculation.num_drafts:
            if self._controller_of(sequence) is None:
                most_tokens = self.draft_prefill.most_cached(sequence, num_drafted * self.block_size)
                most = most_tokens // self.block_size
                self.tables.target.release(sequence.block_ids[most:])
                sequence.block_ids = sequence.block_ids[:most]
            sequence.num_draft_computed = min(num_drafted, len(sequence.block_ids)) * self.block_size
        sequence.num_target_computed = len(sequence.block_ids) * self.block_size
        sequence.num_published_blocks = len(sequence.block_ids)
        sequence.num_drafted_blocks = num_drafted

    def _publish(self, part: PlannedRow) -> None:
        """Publish, before the pass, the blocks that the part will fill, so that other requests can use them."""
        if part.sequence.sequence_id in self._running:
            self.tables.publish(part.sequence, part.end, part.draft_start, part.draft_end)

    def _reserve(self, part: PlannedRow) -> bool:
        """Allocate a part's blocks, preempting sequences if none are free; False if its own one was preempted."""
        while part.sequence.sequence_id in self._running:
            if self.tables.find(part):
                return True
            holders = [one for one in self._running.values() if self.tables.frees(one, part)]
            self._preempt(max(holders, key=expendability, default=part.sequence))
        return False

    def _preempt(self, victim: Sequence) -> None:
        del self._running[victim.sequence_id]
        self._forget(victim)
        insort(self._waiting, victim, key=urgency)
        self.num_preemptions += 1

    def _forget(self, sequence: Sequence) -> None:
        """Drop all K/V of a sequence."""
        self.tables.release(sequence)
        sequence.forget_computed()

    def _admit(self, budget: int, limit: PromptLimit | None) -> PlannedRow | None:
        """Start the first request of the queue if a seat, some budget and blocks for its whole text are free."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return None
        sequence = self._waiting[0]
        self._take_cached(sequence)
        part = self._part(sequence, budget, limit)
        if not part.num_known or not self.tables.admit(part, self._num_text(sequence)):
            self._forget(sequence)
            return None
        self._waiting.pop(0)
        sequence.note_admission(time.monotonic())
        self.num_cache_queries += len(sequence.tokens)
        self.num_cache_hits += sequence.num_target_computed
        self._running[sequence.sequence_id] = sequence
        return part

    def _num_text(self, sequence: Sequence) -> int:
        """Return the number of tokens for which blocks must be free before it starts."""
        from_text = self.config.max_copied_tokens if sequence.text_draft_finder else 0
        return len(sequence.tokens) + num_nodes(sequence.request.speculation.fanout) + from_text

    # -- committing -------------------------------------------------------------------------

    def _append(self, sequence: Sequence, row: Row, emission: Emission) -> Outcome:
        sequence.num_target_computed += len(emission.accepted)
        sequence.num_draft_computed += 0 if sequence.by_head else emission.num_draft_kept
        is_drawn = bool(row.fanout) and not any(part.num_accepted for part in emission.text_draft_counts)
        if self.controller is not None and is_drawn and row.speculation.adaptive:
            self.controller.observe(sequence, row.fanout[0], row.draft_length, len(emission.accepted))
        kept, finish_reason = sequence.cut([*emission.accepted, emission.next_token])
        self.text_planner.learn(sequence, kept)
        prompt_logprobs = sequence.prompt_logprobs if sequence.wants_prompt_logprobs else []
        num_predicted = sequence.text_draft_finder.num_predicted(sequence.tokens, kept)
        sequence.tokens += kept
        # The K/V of the last token is computed in the next step, even if this token is an accepted draft.
        sequence.num_target_computed = min(sequence.num_target_computed, len(sequence.tokens) - 1)
        sequence.num_draft_computed = min(sequence.num_draft_computed, len(sequence.tokens) - 1)
        sequence.shifts = emission.shifts
        if finish_reason is not None:
            self._finish(sequence)
        return Outcome(
            request_id=sequence.request.request_id,
            token_ids=kept,
            finish_reason=finish_reason,
            draft_length=row.longest_chain,
            num_chains=row.num_drafts + len(row.text_drafts),
            text_draft_counts=list(emission.text_draft_counts),
            num_predicted=num_predicted,
            rule=row.speculation.rule,
            num_nodes=emission.num_nodes,
            num_accepted=min(len(emission.accepted), len(kept)),
            num_cached=sequence.num_cached,
            queue_s=sequence.queue_s,
            reading_s=sequence.take_reading(),
            logprobs=list(emission.logprobs[: len(kept)]),
            prompt_logprobs=prompt_logprobs,
            gap=emission.gap,
            bias=emission.bias,
            drafts=emission.chains,
        )

    def _finish(self, sequence: Sequence) -> None:
        controller = self._controller_of(sequence)
        if controller is not None:
            controller.acceptance.note_answer(self.draft_prefill.to_read(sequence), sequence.num_emitted)
        self.text_planner.answers.add(sequence.request, sequence.tokens[sequence.num_prompt :])
        self.tables.publish(sequence, sequence.num_target_computed, sequence.draft_start, sequence.num_draft_computed)
        del self._running[sequence.sequence_id]
        del self._sequence_ids[sequence.request.request_id]
        self.tables.release(sequence)
