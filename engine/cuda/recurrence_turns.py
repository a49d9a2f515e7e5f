"""Divides the tokens of a recurrence into turns, for `recurrence_kernels.py`.

A *turn* is a list of tokens that starts from one state: tokens of a text, then drafted nodes, each
after its ancestors. The text of a turn ends where its state is stored. Nodes change no state.

A *program* walks the turns of a sequence, or of several sequences if one stores what another one
reads or stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.kernels.protocol import Ints, RecurrentSteps

MOST_TOGETHER = 64
"""Most tokens of a turn that is computed as a product; the bits of a word."""


class _Step(NamedTuple):
    """A step (`RecurrentSteps.steps`)."""

    input: int
    source: int
    node: int
    row: int
    seat: int
    cached: int


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
    # Lists: operations on many small arrays would take milliseconds.
    every = [_Step(*column) for column in steps.steps.T.tolist()]
    parts = [every[begin:end] for begin, end in pairwise(steps.begins.tolist())]
    first_states = steps.first_states.tolist()
    tokens: list[tuple[int, int, int]] = []
    turns: list[tuple[int, ...]] = []
    begins = [0]
    for numbers in _programs(parts, first_states):
        for number in numbers:
            source = first_states[number]
            text = [step for step in parts[number] if step.node < 0]
            # The place in which a text's state lies between turns.
            seat = max(text[-1].seat, text[-1].cached) if text else -1
            own = list(_turns(text, parts[number][len(text) :], is_product))
            assert seat >= 0 or not text or len(own) == 1, "a text of several turns has a place at its end"
            for turn, num_text in own:
                last = turn[num_text - 1]
                places = {seat, last.seat, last.cached} - {-1} if num_text else ()
                turns.append((len(tokens), len(turn), source, num_text - 1, *[*places, -1, -1, -1][:3]))
                bits = _bits(turn, num_text) if is_product and len(turn) <= MOST_TOGETHER else [0] * len(turn)
                tokens += [(step.input, step.row, on_path) for step, on_path in zip(turn, bits, strict=True)]
                source = seat if num_text else source
        begins.append(len(turns))
    arrays = (np.array(tokens, dtype=np.int64).reshape(-1, 3), np.array(turns, dtype=np.int64).reshape(-1, 7))
    return Turns(*arrays, np.array(begins, dtype=np.int64))


def _programs(parts: Sequence[Sequence[_Step]], first_states: Sequence[int]) -> list[list[int]]:
    """Return the sequences of each program, in order."""
    programs = list(range(len(parts)))
    stored_B = [{place for step in part for place in (step.seat, step.cached)} - {-1} for part in parts]
    stored = set().union(*stored_B)
    user_of: dict[int, int] = {}
    for number, first_state in enumerate(first_states):
        for place in stored_B[number] | (stored & {first_state}):
            program, other = programs[number], programs[user_of.setdefault(place, number)]
            if program != other:
                programs = [other if one == program else one for one in programs]
    result: dict[int, list[int]] = {}
    for number, program in enumerate(programs):
        result.setdefault(program, []).append(number)
    return list(result.values())


def _turns(text: list[_Step], nodes: list[_Step], is_product: bool) -> Iterator[tuple[list[_Step], int]]:
    """Yield (steps of a turn, tokens of the text among them) of a sequence."""
    turn: list[_Step] = []
    for number, step in enumerate(text, 1):
        turn.append(step)
        is_last = number == len(text)
        is_full = is_product and len(turn) == MOST_TOGETHER
        if not (is_last or is_full or step.seat >= 0 or step.cached >= 0):
            continue
        if is_product and is_last and len(turn) + len(nodes) <= MOST_TOGETHER:
            yield turn + nodes, len(turn)
            return
        yield turn, len(turn)
        turn = []
    for path in _packed(nodes, MOST_TOGETHER if is_product else 0):
        yield path, 0


def _packed(nodes: Sequence[_Step], most: int) -> Iterator[list[_Step]]:
    """Yield the nodes of turns: whole paths, one or together at most `most` nodes."""
    step_of = {step.node: step for step in nodes}
    turn: dict[int, None] = {}
    for leaf in sorted(step_of.keys() - {step.source for step in nodes}):
        path = [leaf]
        while step_of[path[0]].source >= 0:
            path.insert(0, step_of[path[0]].source)
        if turn and len(turn | dict.fromkeys(path)) > most:
            yield [step_of[node] for node in turn]
            # A node is read once.
            step_of |= {node: step_of[node]._replace(row=-1) for node in turn}
            turn = {}
        turn |= dict.fromkeys(path)
    if turn:
        yield [step_of[node] for node in turn]


def _bits(turn: Sequence[_Step], num_text: int) -> Iterator[int]:
    """Yield the tokens on the path of each token of a turn, as a word with a sign."""
    bits_of = {-1: (1 << num_text) - 1}
    for place, step in enumerate(turn):
        bits = (2 << place) - 1
        if step.node >= 0:
            bits = bits_of[step.node] = bits_of[step.source] | 1 << place
        yield bits if bits < 1 << 63 else bits - (1 << 64)
