"""Paths of a pass's rows: the slots of a row, of its drafted ancestors, and of the text."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import Ints, StepLayout, slots_of


class Paths:
    """Paths of the rows of a pass."""

    def __init__(self, layout: StepLayout, page_size: int) -> None:
        self.layout = layout
        self.page_size = page_size
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}
        self._sequence_T = np.repeat(np.arange(len(layout.counts)), layout.counts)

    def windows(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the last slots [T, size] of each path, and whether they belong to it.

        Places before a text's beginning have the row's own slot.
        """
        if size not in self._windows:
            place_TK = self.layout.positions_T[:, None] + np.arange(1 - size, 1)
            slots_TK = self._slots(np.where(place_TK < 0, self.layout.positions_T[:, None], place_TK))
            self._windows[size] = torch.from_numpy(slots_TK), torch.from_numpy(place_TK >= 0)
        return self._windows[size]

    @cached_property
    def _nodes(self) -> Ints:
        """Return the nodes on each row's path by depth [T, most depth], -1 after the row."""
        is_seen_TN = np.unpackbits(self.layout.words.view(np.uint8), axis=1, bitorder="little")
        row_M, node_M = np.nonzero(is_seen_TN)
        counts_T = np.bincount(row_M, minlength=len(is_seen_TN))
        nodes_TD = np.full((len(is_seen_TN), max(1, int(counts_T.max(initial=0)))), -1, dtype=np.int64)
        # A parent comes before its children.
        nodes_TD[row_M, np.arange(len(row_M)) - (np.cumsum(counts_T) - counts_T)[row_M]] = node_M
        return nodes_TD

    def _slots(self, place_TK: Ints) -> Ints:
        """Return the slots [T, K] of places, counted from the text's beginning, on rows' paths."""
        sequence_T1 = self._sequence_T[:, None]
        end_T1 = self.layout.ends[sequence_T1].astype(np.int64)
        depth_TK = np.clip(place_TK - end_T1, 0, self._nodes.shape[1] - 1)
        node_TK = np.take_along_axis(self._nodes, depth_TK, axis=1)
        index_TK = np.where(place_TK < end_T1, place_TK, end_T1 + node_TK)
        return slots_of(self.layout.pages, sequence_T1, index_TK, self.page_size)
