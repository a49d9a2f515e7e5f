"""States of recurrent layers at ends of full blocks, and the steps of a pass that start from them.

The state after a block is a function of the text up to its end, as the block's K and V are, so it
belongs to the block. A pass starts each sequence from the deepest state among its blocks, repeats
the stored inputs of later tokens, and stores the state at the sequence's last full block. It
computes drafted nodes from copies. So a state depends on the text alone: not on drafts, chunks or
other sequences. A missing state costs time, because the inputs of all tokens are stored. The least
recently used states are replaced, and a block that is written to loses its state.
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
        self._place_by_block: OrderedDict[int, int] = OrderedDict()
        """The least recently used first."""
        self._free = list(range(num_states))
        self._num_states = num_states
        self._tensors: dict[int, torch.Tensor] = {}

    def of_call(self, number: int, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return the states [places, H, D_k, D_v] of a call of every pass."""
        if number not in self._tensors:
            # Memory is taken when it is written to.
            self._tensors[number] = torch.from_numpy(np.zeros((self._num_states, *shape), dtype=np.float32))
        return self._tensors[number]

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop the states of blocks whose slots are written to."""
        for block_id in block_ids:
            place = self._place_by_block.pop(block_id, None)
            if place is not None:
                self._free.append(place)

    def steps(self, layout: StepLayout, page_size: int) -> RecurrentSteps:
        """Return the steps of a pass, which stores the states that it announces."""
        self.forget(np.unique(layout.slots_T // page_size).tolist())
        first_index_B = layout.ends - layout.num_inputs_B
        starts = [self._deepest(layout.pages[b], int(first) // page_size) for b, first in enumerate(first_index_B)]
        used = {place for _, place in starts}
        parts: list[Ints] = []
        for number, (num_blocks, _) in enumerate(starts):
            last_block = int(layout.ends[number]) // page_size
            kept = -1
            if last_block > num_blocks:
                kept = self._place(int(layout.pages[number, last_block - 1]), used)
            text = _text_steps(layout, number, page_size, num_blocks * page_size)
            if kept >= 0:
                text[_KEPT, (last_block - num_blocks) * page_size - 1] = kept
            parts.append(np.concatenate([text, _node_steps(layout, number, page_size)], axis=1))
        ends = np.cumsum([part.shape[1] for part in parts])
        first_states = np.array([place for _, place in starts], dtype=np.int64)
        return RecurrentSteps(np.concatenate(parts, axis=1), np.append(0, ends), first_states)

    def _deepest(self, block_ids: np.ndarray, num_full: int) -> tuple[int, int]:
        """Return (number of blocks before a stored state, its place), (0, -1) for none."""
        for count in range(num_full, 0, -1):
            block_id = int(block_ids[count - 1])
            if block_id in self._place_by_block:
                self._place_by_block.move_to_end(block_id)
                return count, self._place_by_block[block_id]
        return 0, -1

    def _place(self, block_id: int, used: set[int]) -> int:
        """Return a place for a block's state; -1 if it is stored, or all places are in use."""
        if block_id in self._place_by_block:
            return -1  # another sequence with the same text stores it
        if not self._free:
            oldest = next((block for block, place in self._place_by_block.items() if place not in used), None)
            if oldest is None:
                return -1
            self.forget([oldest])
        place = self._free.pop()
        self._place_by_block[block_id] = place
        used.add(place)
        return place


_SLOT, _SOURCE, _NODE, _ROW, _KEPT = range(5)
"""Rows of `RecurrentSteps.steps`."""


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
                index = end + node
                slot = int(layout.pages[number, index // page_size]) * page_size + index % page_size
                row = first_row + node if node >= num_cached else -1
                found[node] = [slot, parent, node, row, -1]
            parent = node
    return np.array(list(found.values()), dtype=np.int64).reshape(-1, 5).T
