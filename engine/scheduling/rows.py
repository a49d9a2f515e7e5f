"""A sequence's part of a step before its blocks are allocated (`PlannedRow`), and the `Row` that is built from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from operator import itemgetter
from typing import NamedTuple

from engine.control.controller import menu
from engine.fanout import Fanout, level_widths, num_nodes
from engine.needs import needs_of_drafts
from engine.plan import LogitContext, Row, first_draft_key, num_text_nodes
from engine.request import Speculation, TextDraft
from engine.scheduling.draft_prefill import draft_from
from engine.scheduling.sequence import Sequence

# Prompt tokens that a step computes of a row that reports their logprobs.
_PROMPT_LOGPROBS = 64


class PlannedRow(NamedTuple):
    """Planned part of a step for one sequence, before its blocks are allocated."""

    sequence: Sequence
    end: int
    """Index after the last known token."""
    emits: bool
    fanout: Fanout
    text_drafts: tuple[TextDraft, ...]
    draft_first: int
    draft_end: int
    """Indices of the tokens that the draft model computes."""
    num_nodes: int
    """Nodes of all its drafts, before equal prefixes are merged."""

    @property
    def num_known(self) -> int:
        """Return the number of tokens that the target computes."""
        return self.end - self.sequence.num_target_computed

    @property
    def num_draft_known(self) -> int:
        """Return the number of tokens that the draft model computes."""
        return self.draft_end - self.draft_first

    @property
    def first_index(self) -> int:
        """Return the index of the first token that the target computes."""
        return self.sequence.num_target_computed

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of drawn nodes by depth, from 1 on."""
        return level_widths(self.fanout)

    @property
    def draft_start(self) -> int:
        """Return the index from which the draft model's K/V has no gap after this step."""
        is_moved = self.draft_first != self.sequence.num_draft_computed
        return self.draft_first if is_moved else self.sequence.draft_start

    @property
    def first_draft_key(self) -> int:
        """Return the index of the first token that the draft model sees, if it computes any."""
        return first_draft_key(self.draft_start, self.draft_first, self.end, self.sequence.draft_window)

    @property
    def draft_stop(self) -> int:
        """Return the index after its last draft K/V, drawn nodes included; 0 if the draft model computes nothing."""
        return self.end + num_nodes(self.fanout) if self.draft_end > self.draft_first else 0

    @property
    def needs(self) -> int:
        """Return what the row needs of a step (`engine.needs`)."""
        draft_needs = needs_of_drafts(self.sequence.request.speculation, self.fanout, bool(self.text_drafts))
        return self.sequence.needs | draft_needs

    @property
    def num_tokens(self) -> int:
        """Return the most tokens that it adds to a pass."""
        num_target_tokens = self.num_known + self.num_nodes
        # A head's layer is small compared with the target, so it catches up in one step whatever its lag.
        return num_target_tokens if self.sequence.by_head else max(num_target_tokens, self.num_draft_known)


def in_turn(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Sort by priority, then client by client in turn, each client's sequences by the time since their last row."""
    by_age = sorted(sequences, key=lambda s: (s.last_step, s.sequence_id))
    num_earlier: Counter[tuple[int, str]] = Counter()
    turns = []
    for sequence in by_age:
        client = sequence.request.priority, sequence.request.client
        turns.append((sequence.request.priority, num_earlier[client]))
        num_earlier[client] += 1
    return [sequence for _, sequence in sorted(zip(turns, by_age, strict=True), key=itemgetter(0))]


def fanout_within(speculation: Speculation, most_nodes: int) -> Fanout:
    """Return the drafts of a request without a controller: at most `most_nodes` (at least one) if it is adaptive."""
    most = max(1, most_nodes)
    if not speculation.adaptive or num_nodes(speculation.fanout) <= most:
        return speculation.fanout
    shapes = menu(speculation.num_drafts, speculation.draft_length, speculation.draft_length)
    num_drafts, length = max((s for s in shapes if prod(s) <= most), key=prod)
    return (num_drafts, *(1,) * (length - 1))


def _most_known(sequence: Sequence, budget: int) -> int:
    """Return the most tokens of its text that the target computes in a step with this budget."""
    # Each token that reports its logprob needs a row of logits, so a step computes few of them.
    return min(budget, _PROMPT_LOGPROBS) if sequence.wants_prompt_logprobs else budget


def plan_row(sequence: Sequence, fanout: Fanout, budget: int, most_text_nodes: int, draft_chunk: int) -> PlannedRow:
    """Plan the part of a sequence that fits `budget`: all of it with its nodes, or a chunk of its prompt.

    most_text_nodes: of text drafts that are a function of the text alone. draft_chunk: for a row without drafts, number
    of tokens beyond the target's that the draft model may compute; 0: it computes none.
    """
    total, first = len(sequence.tokens), sequence.num_target_computed
    num_missing = total - first
    finder = sequence.text_draft_finder if most_text_nodes else None
    if num_missing == 1 and budget and not (fanout or finder or draft_chunk):  # as below, in a third of the time
        draft_end = sequence.num_draft_computed
        return PlannedRow(sequence, total, True, (), (), draft_end, draft_end, 0)
    # One token must remain to be emitted after the drafts.
    most = max(0, sequence.num_remaining - 1)
    fanout = fanout[:most]
    # The draft model computes what the target computes, to draft now or after the prompt.
    reads_with_target = bool(fanout)
    # A recomputed text resumes drafting where it stopped: its last token waits for a separate step.
    is_held = reads_with_target and not sequence.may_draft and sequence.num_emitted > 0
    if not sequence.may_draft:
        fanout = ()
    text_drafts = finder.find(sequence.tokens, most_text_nodes, most) if finder else ()
    nodes = num_nodes(fanout) + num_text_nodes(text_drafts)
    chunk = min(budget, _most_known(sequence, budget) + nodes)
    draft_first = draft_from(sequence)
    # The draft model computes `lag` tokens more than the target, so the target's chunk is smaller by `lag`.
    lag = max(0, first - draft_first) if fanout and not sequence.by_head else 0
    emits = num_missing + max(nodes, lag) <= chunk and not is_held
    end = total if emits else first + max(0, min(num_missing - 1, chunk - lag))
    if reads_with_target:
        draft_end = end
    else:
        draft_end = min(end, draft_first + min(end - first + draft_chunk, budget)) if draft_chunk else draft_first
    if draft_first >= draft_end:
        draft_first = draft_end = sequence.num_draft_computed
    if not emits:
        fanout, text_drafts, nodes = (), (), 0
    return PlannedRow(sequence, end, emits, fanout, text_drafts, draft_first, draft_end, nodes)


def text_of(sequence: Sequence) -> LogitContext | None:
    """Return the inputs of the sequence's distribution besides its logits; None if there are none."""
    if not sequence.has_context:
        return None
    of_request = sequence.num_prompt, sequence.fixed_edits, sequence.counts, sequence.request.limits.min_tokens
    return LogitContext(tuple(sequence.tokens), *of_request, sequence.grammar)


def row_of(part: PlannedRow) -> Row:
    """Return the row of a planned part whose sequence holds its blocks."""
    sequence, request = part.sequence, part.sequence.request
    first, end = sequence.num_target_computed, part.end
    return Row(
        sequence_id=sequence.sequence_id,
        request_id=request.request_id,
        input_ids=tuple(sequence.tokens[first:end]),
        first_index=first,
        draft_input_ids=tuple(sequence.tokens[part.draft_first : part.draft_end]),
        draft_first_index=part.draft_first,
        draft_start=part.draft_start,
        draft_window=sequence.draft_window,
        block_ids=sequence.block_ids,
        draft_block_ids=sequence.draft_block_ids or None,
        emits=part.emits,
        sampling=request.sampling,
        speculation=request.speculation,
        fanout=part.fanout,
        text_drafts=part.text_drafts,
        shifts=sequence.shifts,
        text=text_of(sequence) if part.emits else None,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs or 0,
        prompt_next=request.prompt_token_ids[first + 1 : end + 1] if sequence.wants_prompt_logprobs else (),
        reports_drafts=request.reports_drafts,
    )
