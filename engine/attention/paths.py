"""Paths of a pass's rows: the slots of a row, of its drafted ancestors, and of the text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import Ints, StepLayout, slots_of

_SLOTS_AT_ONCE = 1 << 15
"""Slots of paths whose inputs are gathered at once."""


class Paths:
    """Paths of the rows of a pass."""

    def __init__(self, layout: StepLayout, page_size: int) -> None:
        self._layout = layout
        self._page_size = page_size
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}
        self._sequence_T = np.repeat(np.arange(len(layout.counts)), layout.counts)

    def windows(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the last slots [T, size] of each path, and whether they belong to it.

        Places before a text's beginning have the row's own slot.
        """
        if size not in self._windows:
            rows_T = np.arange(len(self._sequence_T))
            place_TK = self._layout.positions_T[:, None] + np.arange(1 - size, 1)
            slots_TK = self._slots(rows_T, np.where(place_TK < 0, self._layout.positions_T[:, None], place_TK))
            self._windows[size] = torch.from_numpy(slots_TK), torch.from_numpy(place_TK >= 0)
        return self._windows[size]

    def texts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (rows [R], slots of paths [P, L], places [R] of the rows on their paths).

        Several inputs of a sequence share one path. Each other row has its own path, which repeats
        the row's slot up to the longest path of the yielded rows.
        """
        layout = self._layout
        is_shared_T = np.zeros(len(layout.positions_T), dtype=np.bool_)
        for number in np.flatnonzero(layout.num_inputs_B > 1):
            start = int(layout.starts[number])
            rows_R = np.arange(start, start + int(layout.num_inputs_B[number]))
            is_shared_T[rows_R] = True
            yield self._part(rows_R, rows_R[-1:])
        alone = np.flatnonzero(~is_shared_T)
        alone = alone[np.argsort(layout.positions_T[alone], kind="stable")[::-1]]
        while len(alone):
            count = max(1, _SLOTS_AT_ONCE // (int(layout.positions_T[alone[0]]) + 1))
            yield self._part(alone[:count], alone[:count])
            alone = alone[count:]

    def _part(self, rows_R: Ints, of_paths: Ints) -> tuple[Tensor, Tensor, Tensor]:
        last_P1 = self._layout.positions_T[of_paths][:, None]
        slots_PL = self._slots(of_paths, np.minimum(np.arange(int(last_P1.max()) + 1), last_P1))
        parts = rows_R, slots_PL, self._layout.positions_T[rows_R]
        rows, slots, places = map(torch.from_numpy, parts)
        return rows, slots, places

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

    def _slots(self, rows_R: Ints, place_RL: Ints) -> Ints:
        """Return the slots [R, L] of places, counted from the text's beginning, on rows' paths."""
        sequence_R1 = self._sequence_T[rows_R][:, None]
        end_R1 = self._layout.ends[sequence_R1].astype(np.int64)
        nodes_RD = self._nodes[rows_R]
        depth_RL = np.clip(place_RL - end_R1, 0, nodes_RD.shape[1] - 1)
        node_RL = np.take_along_axis(nodes_RD, depth_RL, axis=1)
        index_RL = np.where(place_RL < end_R1, place_RL, end_R1 + node_RL)
        return slots_of(self._layout.pages, sequence_R1, index_RL, self._page_size)
