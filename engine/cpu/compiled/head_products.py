"""Products of each head's rows with the head's own weight, in Numba.

`block_products.py` computes the sums, so a row's bits do not depend on other rows.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray

from engine.cpu.compiled.block_products import product
from engine.cpu.compiled.pass_table import array2, array4, table_at
from engine.cpu.compiled.shared_work import c_function, claimed, pointer_to
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.compiler import compiled_for_cpu

# Fields of this function's table: rows [T, H * (K + X)], weights [H, N / B, K, B], output
# [T, H * (N + X)] and a phase's counters.
ROWS, WEIGHTS, RESULT, COUNTERS = range(4)
_ROWS_AT_ONCE = 64


@compiled_for_cpu()
def _multiply_heads(address):
    """Multiply the first K numbers of each head's rows; the X numbers after them are copied."""
    table = table_at(address)
    rows = array2(table, ROWS, np.float32)
    weights = array4(table, WEIGHTS, np.float32)
    result = array2(table, RESULT, np.float32)
    num_heads, num_blocks, depth, _ = weights.shape
    row_width, result_width = rows.shape[1] // num_heads, result.shape[1] // num_heads
    num_columns = result_width - (row_width - depth)
    no_scales, no_bias = np.empty((1, 0, BLOCK), np.float32), np.zeros(num_blocks * BLOCK, np.float32)
    products = np.empty((min(len(rows), _ROWS_AT_ONCE), num_blocks * BLOCK), np.float32)
    for head in claimed(table[COUNTERS, 0], 0, num_heads):
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, len(rows) - first)
            place = np.int64(rows[first].ctypes.data) + head * row_width * 4
            # The product reads K numbers from the beginning of each row.
            part = carray(pointer_to(place), (count, rows.shape[1]), np.float32)
            product(part, weights[head], no_scales, no_bias, products, (0, num_blocks), (0, 1))
            for row in range(count):
                target = result[first + row, head * result_width : (head + 1) * result_width]
                target[:num_columns] = products[row, :num_columns]
                for column in range(row_width - depth):
                    target[num_columns + column] = part[row, depth + column]


@cache
def work():
    """Return the C function of the products, which takes the address of a table."""
    return c_function(lambda address, _1, _2, _3, _4, _5: _multiply_heads(address))
