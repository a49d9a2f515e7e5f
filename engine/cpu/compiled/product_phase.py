"""Product phase of the CPU's decoder: rows with weights of several layouts."""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray

from engine.cpu.compiled import pass_table
from engine.cpu.compiled.block_products import product, product_on_tiles
from engine.cpu.compiled.layer_loops import gate
from engine.cpu.compiled.pass_table import array1, array2, array3, arrays_of_piece, table_at
from engine.cpu.compiled.shared_work import c_function, call, claimed, pointer_to
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.compiler import compiled_for_cpu

_PARTS = 2
"""Parts of a product per core."""


@compiled_for_cpu(inline="always")
def _num_parts_of_blocks(table, num_blocks):
    cores = array1(table, pass_table.SIZES, np.int64)[1]
    if cores == 1:
        return min(num_blocks, 1)
    return min(num_blocks, _PARTS * cores)


@compiled_for_cpu()
def multiply(address, phase, layer, field, source, target):
    """Write the product of a field's rows with a layer's weight to another field.

    For the product of gate and up, each part also writes `gate` of its columns to `GATED`.
    """
    table = table_at(address)
    pieces = array3(table, field, np.int64)[layer]
    together = 2 if field == pass_table.GATE_UP else 1  # a block of gate, and the same of up
    num_blocks = table[field + 1, 2] // (BLOCK * together)
    num_parts = _num_parts_of_blocks(table, num_blocks)
    for part in claimed(table[pass_table.COUNTERS, 0], phase, num_parts):
        first = part * num_blocks // num_parts
        last = (part + 1) * num_blocks // num_parts
        for number in range(len(pieces)):
            piece = pieces[number]
            if piece[pass_table.NUM_BLOCKS] == 0:  # other layers have more pieces
                continue
            place = np.int64(piece.ctypes.data)
            call(piece[pass_table.FUNCTION], address, place, together * first, together * last, source, target)
        if field == pass_table.GATE_UP:
            gate(array2(table, target, np.float32), array2(table, pass_table.GATED, np.float32), first, last)


@compiled_for_cpu()
def _operands_of_piece(address, place, first, last, source, target, word_type, scale_type):
    """Return the operands of the product with a piece's blocks of `first` to `last`.

    place: address of the piece.
    """
    table = table_at(address)
    piece = carray(pointer_to(place), (pass_table.PIECE,), np.int64)
    rows = array2(table, source, np.float32)
    result = array2(table, target, np.float32)
    weights, scales = arrays_of_piece(piece, word_type, scale_type)
    bias = carray(pointer_to(piece[pass_table.BIAS_AT]), (result.shape[1],), np.float32)
    start, step = piece[pass_table.FIRST], piece[pass_table.STEP]
    begin = max(0, (first - start + step - 1) // step)
    end = min(len(weights), (last - start + step - 1) // step)
    return rows, weights, scales, bias, result, (begin, end), (start, step)


@cache
def piece_function(word_type, scale_type, on_tiles=False):
    """Return the C function of a piece of a product, for numpy types of its words and scales."""

    def multiply_piece(address, place, first, last, source, target):
        product(*_operands_of_piece(address, place, first, last, source, target, word_type, scale_type))

    def multiply_piece_on_tiles(address, place, first, last, source, target):
        product_on_tiles(*_operands_of_piece(address, place, first, last, source, target, word_type, scale_type))

    return c_function(multiply_piece_on_tiles if on_tiles else multiply_piece)


@cache
def work():
    """Return the C function of one product, which takes the address of a table.

    The product is the table's `QKV`, of `NORMED` to `JOINED`.
    """

    def multiply_alone(address, _1, _2, _3, _4, _5):
        multiply(address, 0, 0, pass_table.QKV, pass_table.NORMED, pass_table.JOINED)

    return c_function(multiply_alone)
