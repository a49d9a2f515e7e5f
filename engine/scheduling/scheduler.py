"""Continuous batching: `plan()` decides a step, `commit()` is the only writer of sequences.

A step has a budget of tokens. Rows that have waited longest come first, decoding rows before
prompts, so that a long prompt is cut into chunks that ride along with the others' decoding. The queue is served by
priority, then by arrival. When the pool has no block left for a row, the least urgent sequence is preempted: it loses
its K/V, goes back to the queue and is recomputed later, with the same output (its noise depends on positions only).

How many tokens a row drafts depends on the request alone, or on what the controller chose before the step, never on
what is drafted: this keeps the law exact, and answers of the first kind independent of the load.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.cache.store import BlockStore
from engine.config import SchedulerConfig
from engine.plan import Emission, Grammar, Plan, Row, Text, Verdict, level_widths
from engine.request import Request
from engine.scheduling.controller import Controller
from engine.scheduling.copying import most_copied
from engine.scheduling.outcome import Outcome
from engine.scheduling.sequence import Sequence

# Prompt tokens a step computes of a row that reports their logprobs.
_PROMPT_LOGPROBS = 64


def _urgency(sequence: Sequence) -> tuple[int, int]:
    """Order of admission; the last is preempted first."""
    return sequence.request.priority, sequence.arrival


class Scheduler:
    """Queue, running sequences and block accounting."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockStore,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.block_size = blocks.block_size
        self.eos_token_ids = eos_token_ids
        self.controller: Controller | None = None
        """Set once costs have been measured; without it adaptive requests draft all they may."""
        self.num_preemptions = 0
        self.num_cache_queries = 0
        """Tokens of admitted texts, and (next) those of them whose K/V was there."""
        self.num_cache_hits = 0
        self._waiting: list[Sequence] = []
        """Sorted by `_urgency`, the most urgent first."""
        self._running: dict[int, Sequence] = {}
        self._sequence_ids: dict[str, int] = {}
        self.last_plan = Plan(())
        self._next_id = 0
        self._step = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def running(self, sequence_id: int) -> Sequence:
        """The running sequence of a row."""
        return self._running[sequence_id]

    def submit(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request whose length has been checked (`Engine.submit`), and what its answer must follow."""
        assert request.request_id not in self._sequence_ids, request.request_id
        sequence = Sequence(self._next_id, request, time.monotonic(), grammar)
        self._next_id += 1
        self._sequence_ids[request.request_id] = sequence.sequence_id
        insort(self._waiting, sequence, key=_urgency)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; False when it is not (or no longer) here."""
        sequence_id = self._sequence_ids.pop(request_id, None)
        if sequence_id is None:
            return False
        running = self._running.pop(sequence_id, None)
        if running is not None:
            self.blocks.release(running.block_ids)
        else:
            self._waiting = [s for s in self._waiting if s.sequence_id != sequence_id]
        return True

    def plan(self) -> Plan:
        """Choose this step's rows within the token budget and the pool."""
        self._step += 1
        self._choose_shapes()
        budget = self.config.max_num_batched_tokens
        prompts_wait = bool(self._waiting) or any(s.num_missing > 1 for s in self._running.values())
        rows: dict[int, Row] = {}
        for sequence in self._decoding():
            reserved = self.config.max_num_batched_tokens // 4 if prompts_wait and rows else 0
            row = self._row(sequence, budget - reserved)
            if row.samples and self._reserve(sequence, row):
                rows[sequence.sequence_id] = row
                budget -= row.num_tokens
        for sequence in self._prefilling():
            row = self._row(sequence, budget)
            if row.known and self._reserve(sequence, row):
                rows[sequence.sequence_id] = row
                budget -= row.num_tokens
        # What this step computes is there for whoever is admitted now: a pass writes all K/V before it reads any.
        for sequence_id, row in rows.items():
            self._publish(sequence_id, row)
        while (admitted := self._admit(budget)) is not None:
            rows[admitted.sequence_id] = admitted
            budget -= admitted.num_tokens
            self._publish(admitted.sequence_id, admitted)
        # A row may have lost its blocks to an earlier arrival after it was planned.
        kept = []
        for sequence_id, row in rows.items():
            if (holder := self._running.get(sequence_id)) is not None:
                holder.last_step = self._step
                kept.append(replace(row, block_ids=tuple(holder.block_ids)))
        self.last_plan = Plan(tuple(kept))
        return self.last_plan

    def commit(self, plan: Plan, verdict: Verdict) -> list[Outcome]:
        """Append what the step emitted, cut it where the answer ends, free what has ended."""
        emissions: Iterator[Emission] = iter(verdict.emissions)
        prompts = verdict.prompt_logprobs or ((),) * len(plan.rows)
        outcomes = []
        for row, prompt_logprobs in zip(plan.rows, prompts, strict=True):
            sequence = self._running[row.sequence_id]
            sequence.prompt_logprobs += prompt_logprobs
            sequence.num_target_computed = row.end
            sequence.num_draft_computed = row.draft_first_index + len(row.draft_known)
            if row.samples:
                outcomes.append(self._append(sequence, row, next(emissions)))
        return outcomes

    def check_invariants(self) -> None:
        """Raise AssertionError when blocks and sequences contradict each other."""
        self.blocks.check_invariants(block for s in self._running.values() for block in s.block_ids)
        assert not any(s.block_ids for s in self._waiting), "a waiting sequence holds blocks"
        ids = {s.sequence_id for s in self._waiting} | set(self._running)
        assert ids == set(self._sequence_ids.values()), "a request is lost"
        for s in self._running.values():
            assert 0 <= s.num_target_computed < len(s.tokens)
            assert len(s.block_ids) * self.block_size >= s.num_target_computed

    # -- planning ---------------------------------------------------------------------------

    def _decoding(self) -> list[Sequence]:
        return self._longest_waiting(s for s in self._running.values() if s.num_missing == 1)

    def _prefilling(self) -> list[Sequence]:
        return self._longest_waiting(s for s in self._running.values() if s.num_missing > 1)

    @staticmethod
    def _longest_waiting(sequences: Iterable[Sequence]) -> list[Sequence]:
        return sorted(sequences, key=lambda s: (s.last_step, s.arrival))

    def _row(self, sequence: Sequence, budget: int) -> Row:
        """The row of a sequence, its known tokens cut to `budget`; blocks are still to be reserved."""
        request = sequence.request
        speculation = request.speculation
        # One token must stay to be emitted after the drafts.
        most = max(0, sequence.num_remaining - 1)
        branching = self._branching(sequence)[:most]
        copies = sequence.copier.copies(sequence.tokens, min(most, self.config.max_copied_tokens))
        nodes = sum(level_widths(branching)) + sum(len(copy.tokens) for copy in copies)
        chunk = budget
        if sequence.wants_prompt_logprobs:
            # Each of these tokens needs a row of logits: few at a time.
            chunk = min(budget, _PROMPT_LOGPROBS + nodes)
        first, draft_first = sequence.num_target_computed, sequence.num_draft_computed
        # Where the draft model has more to catch up on than the target, it takes the budget.
        lag = max(0, first - draft_first) if speculation.num_drafts and (branching or sequence.num_missing > 1) else 0
        samples = sequence.num_missing + max(nodes, lag) <= chunk
        count = sequence.num_missing if samples else max(0, min(sequence.num_missing - 1, chunk - lag))
        end = first + count
        # Of a prompt the draft model computes all, also where the controller draws nothing yet.
        drafting = bool(branching) or (sequence.num_missing > 1 and speculation.num_drafts > 0)
        return Row(
            sequence_id=sequence.sequence_id,
            known=tuple(sequence.tokens[first:end]),
            first_index=first,
            draft_known=tuple(sequence.tokens[draft_first:end]) if drafting else (),
            draft_first_index=draft_first,
            block_ids=(),
            samples=samples,
            sampling=request.sampling,
            speculation=speculation,
            branching=branching if samples else (),
            copies=copies if samples else (),
            layers=sequence.layers,
            text=self._text(sequence) if samples else None,
            num_logprobs=request.num_logprobs,
            num_prompt_logprobs=request.num_prompt_logprobs or 0,
            prompt_next=request.prompt_token_ids[first + 1 : end + 1] if sequence.wants_prompt_logprobs else (),
        )

    def _branching(self, sequence: Sequence) -> tuple[int, ...]:
        """What the sequence draws: as its request says, or as the controller has chosen."""
        speculation = sequence.request.speculation
        if self.controller is None or not speculation.adaptive:
            return speculation.branching
        lag = sequence.num_target_computed - sequence.num_draft_computed
        if lag > self.config.max_num_batched_tokens // 2 and sequence.num_missing == 1:
            return ()  # its draft model is too far behind to catch up in a step
        return self.controller.branching(sequence)

    def _choose_shapes(self) -> None:
        """Let the controller decide about the requests that decode."""
        if self.controller is None:
            return
        decoding = [s for s in self._running.values() if s.num_missing == 1]
        adaptive = [s for s in decoding if s.request.speculation.adaptive]
        fixed = [s.request.speculation.branching for s in decoding if not s.request.speculation.adaptive]
        self.controller.choose(adaptive, sum(1 + sum(level_widths(branching)) for branching in fixed))

    def _text(self, sequence: Sequence) -> Text | None:
        """What the sequence's law depends on beside the logits."""
        request, limits = sequence.request, sequence.request.limits
        holds_back = sequence.num_emitted < limits.min_tokens
        if not request.sampling.edits_logits and not holds_back:
            return None
        ends = {*limits.stop_token_ids, *(() if limits.ignore_eos else self.eos_token_ids)} if holds_back else ()
        num_prompt = len(request.prompt_token_ids)
        return Text(tuple(sequence.tokens), num_prompt, limits.min_tokens, tuple(sorted(ends)), sequence.grammar)

    def _take_cached(self, sequence: Sequence) -> None:
        """Begin behind what is there of the text already; at least its last token is computed."""
        if sequence.wants_prompt_logprobs:
            return  # each of its tokens needs a row of logits
        keys = sequence.block_keys((len(sequence.tokens) - 1) // self.block_size, self.block_size)
        sequence.block_ids, num_drafted = self.blocks.take_known(keys)
        if sequence.request.speculation.num_drafts:
            # The draft model catches up in the first step: no further than what fits what prompts may have of it.
            most = num_drafted + self.config.max_num_batched_tokens // 8 // self.block_size
            self.blocks.release(sequence.block_ids[most:])
            del sequence.block_ids[most:]
            sequence.num_draft_computed = min(num_drafted, most) * self.block_size
        sequence.num_target_computed = len(sequence.block_ids) * self.block_size
        sequence.num_published_blocks = len(sequence.block_ids)
        sequence.num_drafted_blocks = num_drafted

    def _publish(self, sequence_id: int, row: Row) -> None:
        """Let others use the blocks that are full once the row has been computed."""
        sequence = self._running.get(sequence_id)
        if sequence is not None:
            num_drafted = row.draft_first_index + len(row.draft_known)
            self._publish_blocks(sequence, row.end, num_drafted)

    def _publish_blocks(self, sequence: Sequence, num_target: int, num_draft: int) -> None:
        full, drafted = num_target // self.block_size, min(num_target, num_draft) // self.block_size
        if full <= sequence.num_published_blocks and drafted <= sequence.num_drafted_blocks:
            return
        keys = sequence.block_keys(full, self.block_size)
        for number in {*range(sequence.num_published_blocks, full), *range(sequence.num_drafted_blocks, drafted)}:
            self.blocks.publish(sequence.block_ids[number], keys[number], number < drafted)
        sequence.num_published_blocks = max(full, sequence.num_published_blocks)
        sequence.num_drafted_blocks = max(drafted, sequence.num_drafted_blocks)

    def _reserve(self, sequence: Sequence, row: Row) -> bool:
        """Give the sequence blocks for the row, preempting later arrivals; False if it has been preempted."""
        while sequence.sequence_id in self._running:
            missing = self._num_blocks_missing(sequence, row)
            if missing <= self.blocks.num_free:
                after = sequence.block_ids[-1] if sequence.block_ids else None
                sequence.block_ids += self.blocks.allocate(missing, after)
                return True
            self._preempt(max(self._running.values(), key=_urgency))
        return False

    def _num_blocks_missing(self, sequence: Sequence, row: Row) -> int:
        needed = -(-(row.end + row.num_nodes) // self.block_size)
        return max(0, needed - len(sequence.block_ids))

    def _preempt(self, victim: Sequence) -> None:
        del self._running[victim.sequence_id]
        self.blocks.release(victim.forget_computed())
        insort(self._waiting, victim, key=_urgency)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> Row | None:
        """Start the head of the queue if a seat, some budget and blocks for its whole text are free."""
        if not self._waiting or len(self._running) >= self.config.max_num_seqs:
            return None
        sequence = self._waiting[0]
        self._take_cached(sequence)
        row = self._row(sequence, budget)
        drawn = sum(level_widths(sequence.request.speculation.branching))
        copied = most_copied(self.config.max_copied_tokens) if sequence.copier else 0
        room = len(sequence.tokens) + drawn + copied
        num_missing = -(-room // self.block_size) - len(sequence.block_ids)
        if not row.known or num_missing > self.blocks.num_free:
            self.blocks.release(sequence.forget_computed())
            return None
        self._waiting.pop(0)
        sequence.note_admission(time.monotonic())
        self.num_cache_queries += len(sequence.tokens)
        self.num_cache_hits += sequence.num_target_computed
        sequence.block_ids += self.blocks.allocate(num_missing, sequence.block_ids[-1] if sequence.block_ids else None)
        self._running[sequence.sequence_id] = sequence
        return row

    # -- committing -------------------------------------------------------------------------

    def _append(self, sequence: Sequence, row: Row, emission: Emission) -> Outcome:
        sequence.num_target_computed += len(emission.accepted)
        sequence.num_draft_computed += emission.num_draft_kept
        if self.controller is not None and row.branching and row.speculation.adaptive:
            self.controller.observe(sequence, row.branching[0], row.draft_length, len(emission.accepted))
        emitted = [*emission.accepted, emission.next_token]
        kept, finish_reason = self._cut(sequence, emitted)
        prompt_logprobs = sequence.prompt_logprobs if sequence.wants_prompt_logprobs else []
        num_predicted = sequence.copier.num_predicted(sequence.tokens, kept)
        sequence.tokens += kept
        # The last token's K/V is computed with what follows it, also where an accepted draft has been the last.
        sequence.num_target_computed = min(sequence.num_target_computed, len(sequence.tokens) - 1)
        sequence.num_draft_computed = min(sequence.num_draft_computed, len(sequence.tokens) - 1)
        sequence.layers = emission.layers
        if finish_reason is not None:
            self._finish(sequence)
        return Outcome(
            request_id=sequence.request.request_id,
            token_ids=kept,
            finish_reason=finish_reason,
            draft_length=row.longest_chain,
            num_chains=row.num_drafts + len(row.copies),
            copied=list(emission.copied),
            num_predicted=num_predicted,
            rule=row.speculation.rule,
            num_nodes=emission.num_nodes,
            num_accepted=min(len(emission.accepted), len(kept)),
            num_cached=sequence.num_cached,
            queue_s=sequence.queue_s,
            logprobs=list(emission.logprobs[: len(kept)]),
            prompt_logprobs=prompt_logprobs,
            gap=emission.gap,
            bias=emission.bias,
        )

    def _cut(self, sequence: Sequence, emitted: list[int]) -> tuple[list[int], str | None]:
        limits = sequence.request.limits
        for count, token in enumerate(emitted, start=1):
            ends = token in self.eos_token_ids and not limits.ignore_eos
            if ends or token in limits.stop_token_ids:
                return emitted[:count], "stop"
            if count == sequence.num_remaining:
                return emitted[:count], "length"
        return emitted, None

    def _finish(self, sequence: Sequence) -> None:
        self._publish_blocks(sequence, sequence.num_target_computed, sequence.num_draft_computed)
        del self._running[sequence.sequence_id]
        del self._sequence_ids[sequence.request.request_id]
        self.blocks.release(sequence.block_ids)
        sequence.block_ids = []
