"""States of recurrent layers after tokens of texts, and the steps of a pass that start from them.

A state is a function of the text up to a token, as the token's K and V are, so it belongs to the
token's slot. A pass starts each sequence from the deepest state of its slots, repeats the stored
inputs of later tokens, and stores the states at the last full block and at the end of the text. It
computes drafted nodes from copies. So a state depends on the text alone: not on drafts, chunks or
other sequences. A missing state costs time, because the inputs of all tokens are stored. The least
recently used states are replaced. A slot that is written to loses its state, and so do later slots
of its block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch

from engine.attention.inputs import Ints, StepLayout
from engine.kernels.protocol import RecurrentSteps


class States:
    """States of all recurrent calls of a model."""

    def __init__(self, num_states: int) -> None:
        self._place_by_slot: OrderedDict[int, int] = OrderedDict()
        """The least recently used first."""
        self._free = list(range(num_states))
        self._num_states = num_states
        self._tensors: dict[int, torch.Tensor] = {}

    def states_of_call(self, number: int, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return the states [places, H, D_k, D_v] of a call of every pass."""
        if number not in self._tensors:
            # Memory is taken when it is written to.
            self._tensors[number] = torch.from_numpy(np.zeros((self._num_states, *shape), dtype=np.float32))
        return self._tensors[number]

    def forget(self, slots: Iterable[int]) -> None:
        """Drop the states of slots."""
        for slot in slots:
            place = self._place_by_slot.pop(slot, None)
            if place is not None:
                self._free.append(place)

    def steps(self, layout: StepLayout, page_size: int) -> RecurrentSteps:
        """Return the steps of a pass, which stores the states that it announces."""
        for written in np.unique(layout.slots_T // page_size) * page_size:
            is_inside_T = (layout.slots_T >= written) & (layout.slots_T < written + page_size)
            self.forget(range(int(layout.slots_T[is_inside_T].min()), int(written) + page_size))
        starts = [self._deepest(layout, number, page_size) for number in range(len(layout.counts))]
        used = {place for _, place in starts}
        parts: list[Ints] = []
        for number, (start, _) in enumerate(starts):
            text = _text_steps(layout, number, page_size, start)
            if text.shape[1]:
                before = _slot(layout, number, start - 1, page_size) if start % page_size else None
                self._store(text, start, before, page_size, used)
            parts.append(np.concatenate([text, _node_steps(layout, number, page_size)], axis=1))
        ends = np.cumsum([part.shape[1] for part in parts])
        first_states = np.array([place for _, place in starts], dtype=np.int64)
        return RecurrentSteps(np.concatenate(parts, axis=1), np.append(0, ends), first_states)

    def _deepest(self, layout: StepLayout, number: int, page_size: int) -> tuple[int, int]:
        """Return (tokens before the deepest state of a sequence, its place), (0, -1) for none."""
        first = int(layout.ends[number] - layout.num_inputs_B[number])
        # The last text ended in this block or the one before, unless it was read elsewhere.
        near = max(0, first // page_size - 1) * page_size
        for count in (*range(first, near, -1), *range(near, 0, -page_size)):
            slot = _slot(layout, number, count - 1, page_size)
            if slot in self._place_by_slot:
                self._place_by_slot.move_to_end(slot)
                return count, self._place_by_slot[slot]
        return 0, -1

    def _store(self, text: Ints, start: int, before: int | None, page_size: int, used: set[int]) -> None:
        """Announce the states that a sequence's steps store.

        before: slot inside a block whose state the steps start from, and which moves on to the end.
        """
        end = start + text.shape[1]
        last_block = end // page_size * page_size
        if start < last_block < end:
            text[_KEPT, last_block - start - 1] = self._place(int(text[_SLOT, last_block - start - 1]), used)
        last_slot = int(text[_SLOT, -1])
        if before is None:
            text[_KEPT, -1] = self._place(last_slot, used)
            return
        text[_KEPT, -1] = self._place_by_slot[last_slot] = self._place_by_slot.pop(before)

    def _place(self, slot: int, used: set[int]) -> int:
        """Return a place for a slot's state; -1 if it is stored, or all places are in use."""
        if slot in self._place_by_slot:
            return -1  # another sequence with the same text stores it
        if not self._free:
            oldest = next((other for other, place in self._place_by_slot.items() if place not in used), None)
            if oldest is None:
                return -1
            self.forget([oldest])
        place = self._free.pop()
        self._place_by_slot[slot] = place
        used.add(place)
        return place


_SLOT, _SOURCE, _NODE, _ROW, _KEPT = range(5)
"""Rows of `RecurrentSteps.steps`."""


def _slot(layout: StepLayout, number: int, index: int, page_size: int) -> int:
    return int(layout.pages[number, index // page_size]) * page_size + index % page_size


def _text_steps(layout: StepLayout, number: int, page_size: int, start: int) -> Ints:
    """Return the steps of a sequence's text from an index on."""
    end, num_inputs = int(layout.ends[number]), int(layout.num_inputs_B[number])
    index = np.arange(start, end)
    steps = np.full((5, len(index)), -1, dtype=np.int64)
    steps[_SLOT] = layout.pages[number, index // page_size].astype(np.int64) * page_size + index % page_size
    if num_inputs:
        first_row = int(layout.starts[number])
        steps[_ROW, len(index) - num_inputs :] = np.arange(first_row, first_row + num_inputs)
    return steps


def _node_steps(layout: StepLayout, number: int, page_size: int) -> Ints:
    """Return the steps of a sequence's entering nodes, and of the stored nodes above them."""
    nodes = layout.sequences[number].nodes
    num_cached = len(nodes.cached_depths)
    first_row = int(layout.starts[number] + layout.num_inputs_B[number]) - num_cached
    end = int(layout.ends[number])
    found: dict[int, list[int]] = {}
    for path_N in nodes.ancestry:
        parent = -1
        for node in np.flatnonzero(path_N).tolist():
            if node not in found:
                slot = _slot(layout, number, end + node, page_size)
                row = first_row + node if node >= num_cached else -1
                found[node] = [slot, parent, node, row, -1]
            parent = node
    return np.array(list(found.values()), dtype=np.int64).reshape(-1, 5).T
