"""Calls of compiled functions that read a table of arrays, on all cores that torch uses."""

from __future__ import annotations

import numpy as np
import torch

from engine.cpu.compiled import pass_table
from engine.cpu.compiled.shared_work import PHASE_SIZE, TEAM, together
from engine.cpu.weights import Array


class TableCall:
    """A compiled function with the table of its arrays."""

    def __init__(self, function: int, counters: int) -> None:
        """function: its address; counters: the field of its only phase's counters."""
        self.function = function
        self._table = np.zeros((pass_table.NUM_FIELDS, pass_table.COLUMNS), dtype=np.int64)
        self._arrays: dict[int, Array] = {}
        self._counters = np.zeros(PHASE_SIZE, dtype=np.int64)
        self.put(counters, self._counters)

    def put(self, field: int, array: Array) -> None:
        """Point a field to an array, which is held."""
        assert array.flags.c_contiguous
        self._arrays[field] = array
        self._table[field, : 1 + array.ndim] = [array.ctypes.data, *array.shape]

    def run(self) -> None:
        """Call the function."""
        self._counters[:] = 0
        helpers = TEAM.grow(torch.get_num_threads() - 1)
        together(TEAM.shared, self.function, self._table.ctypes.data, helpers)
