"""The passes in which a head reads texts: the target's states of a token, and the token after it.

The row of the token at index i reads the state at i - 1, so the first token of a text has none, and
is stored in the slot of its index. A head reads in passes of bounded size, whatever its lag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from engine.attention.inputs import NO_NODES, Ints, SequenceInput, slots_of
from engine.kernels.transfer import to_device
from engine.models.runner import ModelRunner
from engine.plan import Row

MOST_ROWS = 2048


def readings(rows: Sequence[Row], ends_wanted: bool, most_rows: int = MOST_ROWS) -> list[list[SequenceInput]]:
    """Return the passes that read the rows' `draft_input_ids`, in order.

    ends_wanted: whether the last tokens of all rows are in the last pass, and wanted there.
    """
    parts = []
    for row in rows:
        first = max(1, row.draft_first_index)  # the first token has no state before it
        tokens = row.draft_input_ids[first - row.draft_first_index :]
        if tokens:
            parts.append((row, first, tokens))
    if not parts:
        return []
    if sum(len(tokens) for _, _, tokens in parts) <= most_rows:
        return [[_part(*part, ends_wanted) for part in parts]]
    if not ends_wanted:
        return list(_cut(parts, most_rows))
    beginnings = [(row, first, tokens[:-1]) for row, first, tokens in parts]
    ends = [_part(row, first + len(tokens) - 1, tokens[-1:], True) for row, first, tokens in parts]
    return [*_cut(beginnings, most_rows), ends]


def _cut(parts: Sequence[tuple[Row, int, tuple[int, ...]]], most_rows: int) -> Iterator[list[SequenceInput]]:
    """Cut the parts into passes of at most `most_rows` rows, in order.

    A text that shares blocks comes after the text that computes them.
    """
    made: list[SequenceInput] = []
    room = most_rows
    for row, first, tokens in parts:
        done = 0
        while done < len(tokens):
            piece = tokens[done : done + room]
            made.append(_part(row, first + done, piece, False))
            done += len(piece)
            room -= len(piece)
            if not room:
                yield made
                made = []
                room = most_rows
    if made:
        yield made


def _part(row: Row, first: int, tokens: tuple[int, ...], end_wanted: bool) -> SequenceInput:
    wanted = slice(len(tokens) - 1, None) if end_wanted else slice(0, 0)
    return SequenceInput(tokens, first, row.block_ids, NO_NODES, wanted, max(1, row.first_draft_key))


def slots_before(parts: Sequence[SequenceInput], target: ModelRunner) -> Tensor:
    """Return [T] slots of the target's states before each input token of a pass; -1 for nodes."""
    slots = []
    for part in parts:
        slots.append(_slots_before(part, target.block_size))
        slots.append(np.full(len(part.nodes.depths), -1))
    return to_device(np.concatenate(slots), target.device)


def states_at(slots_T: Tensor, target: ModelRunner) -> Tensor:
    """Return [T, taps * D] the target's states in some slots."""
    assert target.storage.hidden is not None
    return target.storage.hidden[slots_T]


def _slots_before(part: SequenceInput, block_size: int) -> Ints:
    index_T = np.arange(part.first_index - 1, part.first_index - 1 + len(part.input_ids))
    return slots_of(np.array([part.block_ids]), np.zeros_like(index_T), index_T, block_size)
