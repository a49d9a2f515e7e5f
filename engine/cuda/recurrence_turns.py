"""Divides the tokens of a recurrence into turns, for `recurrence_kernels.py`.

A *turn* is a list of tokens that starts from one state: tokens of a text, then drafted nodes, each
after its ancestors. The text of a turn ends where its state is stored. Nodes change no state.

A *program* walks the turns of a sequence, or of several sequences if one stores what another one
reads or stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.kernels.protocol import Ints, RecurrentSteps

MOST_TOGETHER = 64
"""Most tokens of a turn that is computed as a product; the bits of a word."""
_INPUT, _SOURCE, _NODE, _ROW, _SEAT, _CACHED = range(6)


class Turns(NamedTuple):
    """Turns of a pass, on the host."""

    tokens: Ints
    """[N, 3] Input, row (-1: not read), and tokens of the turn on its path, itself too, as bits."""
    turns: Ints
    """[R, 7] First token, count, first state, last token of the text or -1, places or -1.

    The first state is a place, or -1 for zeros. The state after the last token of the text is
    stored: also at a turn's end within a text, in the place of the state at the text's end.
    """
    begins: Ints
    """[G + 1] First turn of each program, and the number of turns."""

    @property
    def longest(self) -> int:
        """Return the tokens of the longest turn."""
        return int(self.turns[:, 1].max(initial=0))


def turns_of(steps: RecurrentSteps, is_product: bool) -> Turns:
    """Return the turns of a pass.

    is_product: with several paths of nodes together, and up to `MOST_TOGETHER` tokens, unless a
    path of nodes is longer. Else a turn has tokens of the text alone, or a single path.
    """
    tokens: list[Ints] = []
    turns: list[tuple[int, ...]] = []
    begins = [0]
    count = 0
    for numbers in _programs(steps):
        for number in numbers:
            first_state = int(steps.first_states[number])
            columns = steps.steps[:, slice(*steps.begins[number : number + 2])]
            # The place in which a text's state lies between turns.
            seat = max([-1, *columns[_SEAT:, columns[_NODE] < 0][:, -1:].flat])
            for part, last in _parts(columns, is_product):
                tokens.append(np.stack([part[_INPUT], part[_ROW], _bits(part, is_product)], axis=1))
                places = {seat, *part[_SEAT:, last].tolist()} - {-1} if last >= 0 else ()
                turns.append((count, part.shape[1], first_state, last, *[*places, -1, -1, -1][:3]))
                count += part.shape[1]
                first_state = seat if last >= 0 else first_state
        begins.append(len(turns))
    return Turns(
        np.concatenate([np.zeros((0, 3), dtype=np.int64), *tokens]),
        np.array(turns, dtype=np.int64).reshape(-1, 7),
        np.array(begins, dtype=np.int64),
    )


def _programs(steps: RecurrentSteps) -> list[list[int]]:
    """Return the sequences of each program, in order."""
    programs = list(range(len(steps.first_states)))
    stored_B = [set(steps.steps[_SEAT:, slice(*steps.begins[number : number + 2])].flat) - {-1} for number in programs]
    stored = set().union(*stored_B)
    user_of: dict[int, int] = {}
    for number, first_state in enumerate(steps.first_states.tolist()):
        for place in stored_B[number] | (stored & {first_state}):
            program, other = programs[number], programs[user_of.setdefault(place, number)]
            if program != other:
                programs = [other if one == program else one for one in programs]
    result: dict[int, list[int]] = {}
    for number, program in enumerate(programs):
        result.setdefault(program, []).append(number)
    return list(result.values())


def _parts(columns: Ints, is_product: bool) -> Iterator[tuple[Ints, int]]:
    """Yield (steps of a turn, its last token of the text or -1) of a sequence's steps."""
    is_node = columns[_NODE] >= 0
    text, nodes = columns[:, ~is_node], columns[:, is_node]
    most = MOST_TOGETHER if is_product else columns.shape[1]
    first, num_text = 0, text.shape[1]
    for stop in [*(np.flatnonzero((text[_SEAT:] >= 0).any(axis=0)) + 1).tolist(), num_text]:
        while first < stop:
            end = min(stop, first + most)
            part, last = text[:, first:end], end - first - 1
            if is_product and end == num_text and part.shape[1] + nodes.shape[1] <= most:
                part, nodes = np.concatenate([part, nodes], axis=1), nodes[:, :0]
            yield part, last
            first = end
    for places in _packed(nodes, MOST_TOGETHER if is_product else 0):
        yield nodes[:, places], -1
        nodes[_ROW, places] = -1  # read once


def _packed(nodes: Ints, most: int) -> Iterator[list[int]]:
    """Yield the nodes of turns by place: whole paths, one or together at most `most` nodes."""
    sources = nodes[_SOURCE].tolist()
    place_of = {node: place for place, node in enumerate(nodes[_NODE].tolist())}
    turn: dict[int, None] = {}
    for leaf in sorted(place_of[node] for node in place_of.keys() - {*sources}):
        path = [leaf]
        while sources[path[0]] >= 0:
            path.insert(0, place_of[sources[path[0]]])
        if turn and len(turn | dict.fromkeys(path)) > most:
            yield list(turn)
            turn = {}
        turn |= dict.fromkeys(path)
    if turn:
        yield list(turn)


def _bits(part: Ints, is_product: bool) -> Ints:
    """Return the tokens on the path of each token of a turn that is a product."""
    bits = np.zeros(part.shape[1], dtype=np.uint64)
    if not is_product or len(bits) > MOST_TOGETHER:
        return bits.view(np.int64)
    num_text = int((part[_NODE] < 0).sum())
    bits[:num_text] = np.uint64(2**64 - 1) >> np.arange(63, 63 - num_text, -1, dtype=np.uint64)
    bits_of = {-1: bits[num_text - 1] if num_text else np.uint64(0)}
    for place, (source, node) in enumerate(part[[_SOURCE, _NODE], num_text:].T.tolist(), num_text):
        bits[place] = bits_of[node] = bits_of[source] | np.uint64(1) << np.uint64(place)
    return bits.view(np.int64)
