"""Inputs that the recurrent layers of a pass read, and the states that they store.

The inputs of a pass are numbered: its T rows, then the stored nodes that it repeats, then windows
before the states from which its sequences start. A sequence's tokens after its state are stored
nodes, then rows: in a pass over text the nodes are accepted tokens, and in a later pass of the same
step the nodes of earlier passes. A state that one sequence stores, a later one of the pass may
start from.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import Ints, StepLayout
from engine.attention.states import StateSizes
from engine.kernels.protocol import RecurrentSteps
from engine.kernels.transfer import to_device_at_once
from engine.plan import StatePlaces


class Windows(NamedTuple):
    """Inputs that a convolution of K tokens reads, by number."""

    numbers_TK: Tensor
    is_text_TK: Tensor
    """Whether a place belongs to the text; else its number is the row's own."""
    places_P: Tensor
    """Places of the states that the pass stores."""
    stored_PW: Tensor
    """Inputs of each such state, the last K - 1 of its text."""


class Paths:
    """Paths of the rows of a pass."""

    def __init__(self, layout: StepLayout, sizes: StateSizes, device: torch.device) -> None:
        """device: of the storage, to which each index is copied once."""
        self._layout = layout
        self._device = device
        self._texts = [_places_of(layout, number, sizes.num_seats) for number in range(len(layout.counts))]
        first_B = layout.ends - layout.num_inputs_B
        num_cached_B = [len(sequence.nodes.cached_depths) for sequence in layout.sequences]
        covered_B = np.array([text.covered for text in self._texts], dtype=np.int64)
        self._num_stored_B = first_B - covered_B + num_cached_B
        assert (self._num_stored_B <= sizes.num_nodes).all(), "a pass repeats more tokens than a seat has"
        num_stored = int(self._num_stored_B.sum())
        num_rows = len(layout.token_ids_T)
        self._first_stored_B = num_rows + np.cumsum(self._num_stored_B) - self._num_stored_B
        self._num_inputs = num_rows + num_stored
        self._covered_B = covered_B
        self._sequence_T = np.repeat(np.arange(len(layout.counts)), layout.counts)
        self._windows: dict[int, Windows] = {}
        seat_B = np.array([text.seat for text in self._texts], dtype=np.int64) * sizes.num_nodes
        node_S = np.arange(num_rows, self._num_inputs) - np.repeat(self._first_stored_B, self._num_stored_B)
        stored_S = np.repeat(seat_B, self._num_stored_B) + node_S
        sources_B = np.array([max(0, text.source) for text in self._texts])
        row_T = np.arange(num_rows) - layout.starts[self._sequence_T]
        node_T = row_T - layout.num_inputs_B[self._sequence_T] + np.array(num_cached_B)[self._sequence_T]
        is_node_T = (row_T >= layout.num_inputs_B[self._sequence_T]) & (node_T < sizes.num_nodes)
        node_rows_N = np.flatnonzero(is_node_T)
        node_slots_N = (seat_B[self._sequence_T] + node_T)[is_node_T]
        places = to_device_at_once((stored_S, sources_B, node_rows_N, node_slots_N), device)
        self.stored_S, self.sources_B, self.node_rows_N, self.node_slots_N = places
        """Slots of the stored nodes; place of the state from which each sequence starts, any
        if it starts from nothing; rows of drafted nodes, and their slots."""

    def windows(self, size: int) -> Windows:
        """Return what a convolution of this many tokens reads."""
        if size not in self._windows:
            self._windows[size] = self._windows_of(size)
        return self._windows[size]

    @cached_property
    def steps(self) -> RecurrentSteps:
        """Return the steps of a recurrence."""
        parts = []
        for number, text in enumerate(self._texts):
            parts += [self._text_steps(number, text), self._node_steps(number)]
        ends = np.cumsum([part.shape[1] for part in parts])[1::2]
        first_states = np.array([text.source for text in self._texts], dtype=np.int64)
        return RecurrentSteps(np.concatenate(parts, axis=1), np.append(0, ends), first_states)

    @cached_property
    def _nodes(self) -> Ints:
        """Return the nodes on each row's path by depth [T, most depth], -1 after the row."""
        is_seen_TN = np.unpackbits(self._layout.words.view(np.uint8), axis=1, bitorder="little")
        row_M, node_M = np.nonzero(is_seen_TN)
        counts_T = np.bincount(row_M, minlength=len(is_seen_TN))
        nodes_TD = np.full((len(is_seen_TN), max(1, int(counts_T.max(initial=0)))), -1, dtype=np.int64)
        # A parent comes before its children.
        nodes_TD[row_M, np.arange(len(row_M)) - (np.cumsum(counts_T) - counts_T)[row_M]] = node_M
        return nodes_TD

    def _windows_of(self, size: int) -> Windows:
        place_TK = self._layout.positions_T[:, None] + np.arange(1 - size, 1)
        is_text_TK = place_TK >= 0
        place_TK = np.where(is_text_TK, place_TK, self._layout.positions_T[:, None])
        end_T1 = self._layout.ends[self._sequence_T][:, None].astype(np.int64)
        depth_TK = np.clip(place_TK - end_T1, 0, self._nodes.shape[1] - 1)
        node_TK = np.take_along_axis(self._nodes, depth_TK, axis=1)
        index_TK = np.where(place_TK < end_T1, place_TK, end_T1 + node_TK)
        before_BW = self._num_inputs + np.arange(len(self._texts) * (size - 1)).reshape(-1, size - 1)
        stored: dict[int, Ints] = {}
        for number, text in enumerate(self._texts):
            before_BW[number] = stored.get(text.source, before_BW[number])
            for end, place in self._stored(number, text):
                stored[place] = self._numbers(np.array(number), np.arange(end - size + 1, end), before_BW)
        stored_PW = np.array([*stored.values()], dtype=np.int64).reshape(-1, size - 1)
        numbers_TK = self._numbers(self._sequence_T[:, None], index_TK, before_BW)
        arrays = (numbers_TK, is_text_TK, np.array([*stored], dtype=np.int64), stored_PW)
        return Windows(*to_device_at_once(arrays, self._device))

    def _numbers(self, sequence: Ints, index: Ints, before_BW: Ints) -> Ints:
        """Return the numbers of inputs; index: place in the sequence, with nodes after the text."""
        after = index - self._covered_B[sequence]
        num_stored = self._num_stored_B[sequence]
        stored = self._first_stored_B[sequence] + after
        rows = self._layout.starts[sequence] + after - num_stored
        width = before_BW.shape[1]
        before = before_BW[sequence, np.clip(after + width, 0, width - 1)]
        numbers: Ints = np.where(after < 0, before, np.where(after < num_stored, stored, rows)).astype(np.int64)
        return numbers

    def _stored(self, number: int, text: StatePlaces) -> Iterator[tuple[int, int]]:
        """Yield (end of the text, place) of each state that a sequence stores."""
        if self._layout.num_inputs_B[number]:
            yield int(self._layout.ends[number]), text.seat
            yield from text.kept

    def _text_steps(self, number: int, text: StatePlaces) -> Ints:
        """Return the steps of a sequence's text after its state."""
        index = np.arange(text.covered, int(self._layout.ends[number]))
        steps = np.full((6, len(index)), -1, dtype=np.int64)
        if not len(index):
            return steps
        steps[_INPUT] = self._numbers(np.array(number), index, np.zeros((len(self._texts), 1), dtype=np.int64))
        steps[_ROW] = np.where(steps[_INPUT] < len(self._sequence_T), steps[_INPUT], -1)
        steps[_SEAT, -1] = text.seat
        for end, place in text.kept:
            steps[_CACHED, end - text.covered - 1] = place
        return steps

    def _node_steps(self, number: int) -> Ints:
        """Return the steps of a sequence's entering nodes, and of the stored nodes above them."""
        nodes = self._layout.sequences[number].nodes
        num_stored = len(nodes.cached_depths)
        first_row = int(self._layout.starts[number] + self._layout.num_inputs_B[number]) - num_stored
        first_stored = int(self._first_stored_B[number])
        found: dict[int, list[int]] = {}
        for path_N in nodes.ancestry:
            parent = -1
            for node in np.flatnonzero(path_N).tolist():
                if node not in found:
                    is_row = node >= num_stored
                    row = first_row + node if is_row else -1
                    found[node] = [row if is_row else first_stored + node, parent, node, row, -1, -1]
                parent = node
        return np.array(list(found.values()), dtype=np.int64).reshape(-1, 6).T


_INPUT, _SOURCE, _NODE, _ROW, _SEAT, _CACHED = range(6)
"""Rows of `RecurrentSteps.steps`."""


def _places_of(layout: StepLayout, number: int, num_seats: int) -> StatePlaces:
    """Return the places of a sequence's states.

    A pass that was not planned by the scheduler has a seat for each of its sequences.
    """
    first = int(layout.ends[number] - layout.num_inputs_B[number])
    seat = number % num_seats
    places = layout.sequences[number].state or StatePlaces(seat, seat if first else -1, first)
    if layout.num_inputs_B[number]:
        return places
    return StatePlaces(places.seat, places.seat, first)
