"""Phases of heads alone: norms of the target's states, convolutions, and `TERM`."""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np

from engine.cpu.compiled import pass_table
from engine.cpu.compiled.floats import FAST
from engine.cpu.compiled.layer_loops import norm
from engine.cpu.compiled.pass_table import array1, array2, array4, put2, table_at
from engine.cpu.compiled.product_phase import multiply
from engine.cpu.compiled.shared_work import c_function, claimed
from engine.cpu.compiled.shared_work import together as share
from engine.cpu.compiler import compiled_for_cpu


@compiled_for_cpu(**FAST)
def normalise(address, phase):
    """Normalise the target's states in place, with a norm for each part of a row."""
    table = table_at(address)
    eps = array1(table, pass_table.CONSTANTS, np.float32)[0]
    rows = array2(table, pass_table.TARGET_STATES, np.float32)
    norms = array2(table, pass_table.TARGET_NORMS, np.float32)
    num_parts, width = norms.shape
    for part in claimed(table[pass_table.COUNTERS, 0], phase, num_parts):
        for row in range(len(rows)):
            states = rows[row, part * width : (part + 1) * width]
            norm(states, norms[part], eps, states)


@compiled_for_cpu(**FAST)
def convolve(address, phase, number, side, field):
    """Convolve each row of every block with the rows before it in the block, in place.

    number: index of the convolution, two for each layer; side: 0 before a part of the
    layer, 1 after it.
    """
    table = table_at(address)
    rows = array2(table, field, np.float32)
    kernels = array4(table, pass_table.CONVOLUTIONS, np.float32)[number, side]
    row_kernels = array2(table, pass_table.ROW_KERNELS, np.float32)
    sizes = array1(table, pass_table.BLOCK_SIZES, np.int64)
    size, group = sizes[0], sizes[1]
    num_taps, width = kernels.shape
    num_parts = (len(rows) + size - 1) // size
    for part in claimed(table[pass_table.COUNTERS, 0], phase, num_parts):
        first = part * size
        last = min(len(rows), first + size) - 1
        # Backwards, because the rows after a row read its numbers.
        for row in range(last, first - 1, -1):
            for tap in range(min(num_taps, row - first + 1)):
                start = (side * num_taps + tap) * (width // group)
                for column in range(width):
                    kernel = kernels[tap, column] + row_kernels[row, start + column // group]
                    added = kernel * rows[row - tap, column]
                    rows[row, column] = added if tap == 0 else rows[row, column] + added


@compiled_for_cpu()
def multiply_term(address):
    """Write the product `TERM` of `MEMORY` to `LOGITS`."""
    multiply(address, 0, 0, pass_table.TERM, pass_table.MEMORY, pass_table.LOGITS)


@cache
def term():
    """Return `multiply_term` as a C function, which takes the address of a table."""
    return c_function(lambda address, _1, _2, _3, _4, _5: multiply_term(address))


@compiled_for_cpu(nogil=True)
def run_term(shared, function, table, memory, terms):
    """Write the product `TERM` of memory [N, r] to terms [N, at least V].

    With the cores of the last pass. function: address of `term`.
    """
    put2(table, pass_table.MEMORY, memory)
    put2(table, pass_table.LOGITS, terms)
    array2(table, pass_table.COUNTERS, np.int64)[:] = 0
    share(shared, function, np.int64(table.ctypes.data), array1(table, pass_table.SIZES, np.int64)[1] - 1)
