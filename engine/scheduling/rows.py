"""Rows of a step: `PlannedRow` before its blocks are allocated, and `Row` built from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from operator import itemgetter
from typing import NamedTuple

from engine.control.controller import menu
from engine.fanout import Fanout, chains, level_widths, num_nodes
from engine.needs import needs_of_drafts
from engine.plan import LogitContext, Row, first_draft_key, num_text_nodes
from engine.request import Speculation, TextDraft
from engine.scheduling.sequence import Sequence

# Prompt tokens that a step computes of a row that reports their logprobs.
_PROMPT_LOGPROBS = 64


class PlannedRow(NamedTuple):
    """Planned row of a sequence in a step, before its blocks are allocated.

    Indices of the draft model in the text and its drafts; parts may be empty:

        0 ... draft_kv_first ... draft_read_first ... draft_read_end   end ... draft_kv_stop
              has K/V            computes now         computes later   drafts

    Tokens before `draft_kv_first` may have no draft K/V. If the row draws
    drafts, `draft_read_end` is `end`.
    """

    sequence: Sequence
    end: int
    """Index after the last known token."""
    emits: bool
    fanout: Fanout
    text_drafts: tuple[TextDraft, ...]
    draft_read_first: int
    """First index that the draft model computes."""
    draft_read_end: int
    """Index after the last one that the draft model computes."""
    num_nodes: int
    """Nodes of all drafts, before equal prefixes of drawn chains are merged."""

    @property
    def num_known(self) -> int:
        return self.end - self.sequence.num_target_computed

    @property
    def num_draft_known(self) -> int:
        return self.draft_read_end - self.draft_read_first

    @property
    def first_index(self) -> int:
        return self.sequence.num_target_computed

    @property
    def widths(self) -> tuple[int, ...]:
        return level_widths(self.fanout)

    @property
    def draft_kv_first(self) -> int:
        """Return the index from which the draft model's K/V has no gap after this step."""
        is_moved = self.draft_read_first != self.sequence.num_draft_computed
        return self.draft_read_first if is_moved else self.sequence.draft_kv_first

    @property
    def first_draft_key(self) -> int:
        """Return the index of the first token that the draft model sees, if it computes any."""
        window = self.sequence.draft_window
        return first_draft_key(self.draft_kv_first, self.draft_read_first, self.end, window)

    @property
    def draft_kv_stop(self) -> int:
        """Return the index after its draft K/V, with nodes; 0 if it computes none."""
        if self.draft_read_end <= self.draft_read_first:
            return 0
        return self.end + num_nodes(self.fanout)

    @property
    def needs(self) -> int:
        """Return what the row needs of a step (`engine.needs`)."""
        speculation = self.sequence.request.speculation
        draft_needs = needs_of_drafts(speculation, self.fanout, bool(self.text_drafts))
        return self.sequence.needs | draft_needs

    @property
    def num_tokens(self) -> int:
        num_target_tokens = self.num_known + self.num_nodes
        # A head's layer is small compared with the target: it catches up in one step.
        if self.sequence.by_head:
            return num_target_tokens
        return max(num_target_tokens, self.num_draft_known)


def in_turn(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Sort by priority, by turns of clients, and by the time since a sequence's last row."""
    by_age = sorted(sequences, key=lambda s: (s.last_step, s.sequence_id))
    num_earlier: Counter[tuple[int, str]] = Counter()
    turns = []
    for sequence in by_age:
        priority = sequence.request.priority
        client = (priority, sequence.request.client)
        turns.append((priority, num_earlier[client]))
        num_earlier[client] += 1
    in_order = sorted(zip(turns, by_age, strict=True), key=itemgetter(0))
    return [sequence for _, sequence in in_order]


def fanout_within(speculation: Speculation, most_nodes: int) -> Fanout:
    """Return drafts that the controller does not choose; `most_nodes` bounds adaptive requests."""
    most_nodes = max(1, most_nodes)
    if not speculation.adaptive or num_nodes(speculation.fanout) <= most_nodes:
        return speculation.fanout
    shapes = menu(speculation.num_drafts, speculation.draft_length, speculation.draft_length)
    fitting = [shape for shape in shapes if prod(shape) <= most_nodes]
    num_drafts, length = max(fitting, key=prod)
    return chains(num_drafts, length)


def _most_known(sequence: Sequence, budget: int) -> int:
    """Return the most tokens of its text that the target computes in a step with this budget."""
    # Each token that reports its logprob needs a row of logits, so a step computes few of them.
    return min(budget, _PROMPT_LOGPROBS) if sequence.wants_prompt_logprobs else budget


def plan_row(
    sequence: Sequence,
    fanout: Fanout,
    budget: int,
    most_text_nodes: int,
    draft_chunk: int | None,
) -> PlannedRow:
    """Plan a row within `budget`: all of the text with drafts, or a chunk of the prompt.

    most_text_nodes: of text drafts that depend on the text alone. draft_chunk: for a row without
    drafts, tokens beyond the target's that the draft model may compute; None if it computes none.
    """
    total = len(sequence.tokens)
    finder = sequence.text_draft_finder if most_text_nodes else None
    may_read = bool(fanout) or draft_chunk is not None
    # The usual row, planned in a third of the time.
    if sequence.num_missing == 1 and budget > 0 and not (may_read or finder):
        draft_end = sequence.num_draft_computed
        return PlannedRow(sequence, total, True, (), (), draft_end, draft_end, 0)
    # One token must remain to be emitted after the drafts.
    deepest = max(0, sequence.num_remaining - 1)
    fanout = fanout[:deepest]
    # The draft model computes the target's tokens, to draft now or after the prompt.
    reads_with_target = bool(fanout)
    # A recomputed text resumes drafting where it stopped: its last token waits for a separate step.
    head_must_wait = reads_with_target and not sequence.may_draft and sequence.num_emitted > 0
    if not sequence.may_draft:
        fanout = ()
    text_drafts: tuple[TextDraft, ...] = ()
    if finder:
        text_drafts = finder.find(sequence.tokens, most_text_nodes, deepest)
    nodes = num_nodes(fanout) + num_text_nodes(text_drafts)
    chunk = min(budget, _most_known(sequence, budget) + nodes)
    # The draft model computes this many tokens more than the target, and both fit the chunk.
    num_extra = 0
    if fanout and not sequence.by_head:
        num_extra = sequence.draft_lag
    emits = not head_must_wait and sequence.num_missing + max(nodes, num_extra) <= chunk
    end = total
    if not emits:
        end = _chunk_end(sequence, chunk - num_extra)
        fanout = ()
        text_drafts = ()
        nodes = 0
    most_read = 0
    if reads_with_target:
        most_read = total
    elif draft_chunk is not None:
        most_read = min(end - sequence.num_target_computed + draft_chunk, budget)
    read_first, read_end = _draft_range(sequence, end, most_read)
    return PlannedRow(sequence, end, emits, fanout, text_drafts, read_first, read_end, nodes)


def _chunk_end(sequence: Sequence, most: int) -> int:
    """Return the index after a chunk of at most this many tokens of its text."""
    # A row that reaches the end of the text emits, so a chunk leaves at least one token.
    num_known = max(0, min(sequence.num_missing - 1, most))
    return sequence.num_target_computed + num_known


def _draft_range(sequence: Sequence, end: int, most: int) -> tuple[int, int]:
    """Return the range of at most this many tokens before `end` that the draft model computes."""
    first = sequence.next_draft_read
    stop = min(end, first + most)
    if first >= stop:
        return sequence.num_draft_computed, sequence.num_draft_computed
    return first, stop


def text_of(sequence: Sequence) -> LogitContext | None:
    """Return the inputs of the sequence's distribution besides its logits; None if it has none."""
    if not sequence.has_context:
        return None
    return LogitContext(
        tokens=tuple(sequence.tokens),
        num_prompt=sequence.num_prompt,
        fixed=sequence.fixed_edits,
        counts=sequence.counts,
        min_tokens=sequence.request.limits.min_tokens,
        grammar=sequence.grammar,
    )


def row_of(planned: PlannedRow) -> Row:
    """Return the row of a planned row whose sequence holds its blocks."""
    sequence = planned.sequence
    request = sequence.request
    first = sequence.num_target_computed
    end = planned.end
    prompt_next: tuple[int, ...] = ()
    if sequence.wants_prompt_logprobs:
        prompt_next = request.prompt_token_ids[first + 1 : end + 1]
    return Row(
        sequence_id=sequence.sequence_id,
        request_id=request.request_id,
        input_ids=tuple(sequence.tokens[first:end]),
        first_index=first,
        draft_input_ids=tuple(sequence.tokens[planned.draft_read_first : planned.draft_read_end]),
        draft_first_index=planned.draft_read_first,
        draft_kv_first=planned.draft_kv_first,
        draft_window=sequence.draft_window,
        block_ids=sequence.block_ids,
        draft_block_ids=sequence.draft_block_ids or None,
        emits=planned.emits,
        sampling=request.sampling,
        speculation=request.speculation,
        fanout=planned.fanout,
        text_drafts=planned.text_drafts,
        shifts=sequence.shifts,
        text=text_of(sequence) if planned.emits else None,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs or 0,
        prompt_next=prompt_next,
        reports_drafts=request.reports_drafts,
        state=sequence.states.places,
        draft_state=sequence.draft_states.places,
    )
