"""Product phase of the CPU's decoder: rows with a layer's weight, whose pieces may have several layouts."""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray

from engine.cpu.compiled import pass_table as nt
from engine.cpu.compiled.block_products import product
from engine.cpu.compiled.layer_loops import gate
from engine.cpu.compiled.pass_table import array1, array2, array3, arrays_of_piece, table_at
from engine.cpu.compiled.shared_work import c_function, call, claimed, pointer_to
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.compiler import compiled_for_cpu

_PARTS = 2
"""Parts of a product per core."""


@compiled_for_cpu(inline="always")
def _num_parts_of_blocks(table, num_blocks):
    cores = array1(table, nt.SIZES, np.int64)[1]
    return min(num_blocks, 1 if cores == 1 else _PARTS * cores)


@compiled_for_cpu()
def multiply(address, phase, layer, field, source, target):
    """Write the product of the rows of one field with a layer's weight to another field, in parts of whole blocks.

    For the product of gate and up, each part also writes `gate` of its columns to `GATED`.
    """
    table = table_at(address)
    counters, pieces = array2(table, nt.COUNTERS, np.int64), array3(table, field, np.int64)[layer]
    together = 2 if field == nt.GATE_UP else 1  # a block of gate, and the same of up
    num_blocks = table[field + 1, 2] // (BLOCK * together)
    num_parts = _num_parts_of_blocks(table, num_blocks)
    for part in claimed(counters, phase, num_parts):
        first, last = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
        for number in range(len(pieces)):
            if pieces[number, nt.NUM_BLOCKS] == 0:  # other layers have more
                continue
            place = np.int64(pieces[number].ctypes.data)
            call(pieces[number, nt.FUNCTION], address, place, together * first, together * last, source, target)
        if field == nt.GATE_UP:
            gate(array2(table, target, np.float32), array2(table, nt.GATED, np.float32), first, last)


@compiled_for_cpu()
def _multiply_piece(address, place, first, last, source, target, word_type, scale_type):
    """Write what a piece of a product has of blocks `first` to `last` of the result; place: address of the piece."""
    table, piece = table_at(address), carray(pointer_to(place), (nt.PIECE,), np.int64)
    rows, result = array2(table, source, np.float32), array2(table, target, np.float32)
    weights, scales = arrays_of_piece(piece, word_type, scale_type)
    bias = carray(pointer_to(piece[nt.BIAS_AT]), (result.shape[1],), np.float32)
    start, step = piece[nt.FIRST], piece[nt.STEP]
    begin = max(0, (first - start + step - 1) // step)
    end = min(len(weights), (last - start + step - 1) // step)
    if begin >= end:
        return
    product(rows, weights, scales, bias, result, (begin, end), (start, step))


@cache
def multiplication(word_type, scale_type):
    """Return the C function of a piece of a product, for numpy types of its words and scales."""

    def multiply(address, place, first, last, source, target):
        _multiply_piece(address, place, first, last, source, target, word_type, scale_type)

    return c_function(multiply)
