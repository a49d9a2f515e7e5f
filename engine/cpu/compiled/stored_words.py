"""Words and scales of weights multiplied by dot products (`dot_products.py`).

A weight is an array [N / B, words, B]; a word is one element of it. Layouts of a block, by the
numpy type of the words:
- int8: the shape is [K, B], but its bytes are ordered [K / 4, B, 4]. Numbers are stored plus 128;
- uint8: the shape is [K / 2, B], but its bytes are ordered [K / 8, B, 4]. A byte has a number of K
  in its lower half, and in its upper half the number four places on. Numbers are stored plus 8;
- uint32: the shape is [K / 2, B], and a word is a pair of bfloat16 numbers.

K is padded with zeros to whole groups of `GROUP` numbers. Bytes and nibbles stand for scale *
number, with scales in blocks [N / B, rows, width], by the numpy type of these:
- float32: a scale of each group, [K / 32, B];
- int16: the same in float16;
- uint16: a scale and a minimum of each group in float16, [K / 32, 2 B];
- uint8: records of 256 numbers, [K / 256, 20 B]: two float16 factors, then a byte for the scale and
  one for the minimum of each group;
- int8: records of 256 numbers, [K / 256, 18 B]: a float16 factor, then a signed byte for the scale
  of each 16 numbers.

Numbers with a minimum stand for scale * number + minimum, and are stored without an offset.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a
# list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from engine.cpu.compiled.floats import number_of_half, widened
from engine.cpu.compiled.simd_vectors import BLOCK, GROUP

DOT_TYPES = (types.int8, types.uint8, types.uint32)
"""Types of the words of weights that are multiplied here."""
RECORD = 256
"""Numbers of a column that a record of scales is for."""
MINIMA = (types.uint16, types.uint8)
"""Types of scales with minima."""
_OFFSETS = {types.int8: 128, types.uint8: 8}


def offset_of(words: Any, scales: Any) -> int:
    """Return the number that is added to stored weights; words, scales: Numba's types."""
    return 0 if scales in MINIMA else _OFFSETS[words]


def num_parts_of(scales: Any) -> int:
    """Return the number of parts of a group with a scale each; scales: Numba's type."""
    return 2 if scales == types.int8 else 1


class Bfloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's type `bfloat`, which llvmlite lacks."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: float) -> str:
        return str(value)


Bfloat._create_instance()


def numbers_of_word(weights):
    """Return the number of numbers of K in a word."""
    raise NotImplementedError


@overload(numbers_of_word, inline="always")
def _numbers_of_word(weights):
    count = 1 if weights.dtype == types.int8 else 2
    return lambda weights: count


def num_parts(scales):
    """Return the number of parts of a group with a scale each."""
    raise NotImplementedError


@overload(num_parts, inline="always")
def _num_parts(scales):
    count = num_parts_of(scales.dtype)
    return lambda scales: count


def value_of(weights, scales, block, number, column):
    """Return the value of number `number` of K of a column."""
    raise NotImplementedError


@overload(value_of, inline="always")
def _value_of(weights, scales, block, number, column):
    if weights.dtype == types.uint32:
        return lambda weights, scales, block, number, column: widened(
            np.uint16(weights[block, number // 2, column] >> np.uint32(16 * (number % 2)))
        )
    if weights.dtype not in DOT_TYPES:
        return lambda weights, scales, block, number, column: widened(weights[block, number, column])
    offset = offset_of(weights.dtype, scales.dtype)
    numbers_per_word = 4 if weights.dtype == types.int8 else 8

    def value(weights, scales, block, number, column):
        place = (number // numbers_per_word * BLOCK + column) * 4 + number % 4
        stored = np.int64(weights[block, place // BLOCK, place % BLOCK]) & 255
        if numbers_per_word == 8:
            stored = (stored >> (number // 4 % 2 * 4)) & 15
        return _scaled(np.float32(stored - offset), scales, block, number, column)

    return value


def _scaled(stored, scales, block, number, column):
    """Return the value of a stored number of K."""
    raise NotImplementedError


@overload(_scaled, inline="always")
def _scaled_by_type(stored, scales, block, number, column):
    if scales.dtype == types.float32:
        return lambda stored, scales, block, number, column: stored * scales[block, number // GROUP, column]
    if scales.dtype == types.int16:
        return lambda stored, scales, block, number, column: (
            stored * number_of_half(scales[block, number // GROUP, column])
        )
    if scales.dtype == types.uint16:

        def scaled(stored, scales, block, number, column):
            group = scales[block, number // GROUP]
            return stored * number_of_half(group[column]) + number_of_half(group[BLOCK + column])

        return scaled
    return _scaled_by_records(scales.dtype == types.uint8)


def _scaled_by_records(has_minima):
    def scaled(stored, scales, block, number, column):
        record = scales[block, number // RECORD]
        factor = number_of_half(np.int64(record[2 * column]) & 255 | (np.int64(record[2 * column + 1]) & 255) << 8)
        place = number % RECORD // 16 * BLOCK + column
        return stored * (factor * np.float32(record[2 * BLOCK + place]))

    def scaled_with_minima(stored, scales, block, number, column):
        record = scales[block, number // RECORD]
        place = number % RECORD // GROUP * BLOCK + column
        factor = number_of_half(np.int64(record[2 * column]) | np.int64(record[2 * column + 1]) << 8)
        second = 2 * BLOCK + 2 * column
        minimum_factor = number_of_half(np.int64(record[second]) | np.int64(record[second + 1]) << 8)
        scale = factor * np.float32(record[4 * BLOCK + place])
        return stored * scale + minimum_factor * np.float32(record[12 * BLOCK + place])

    return scaled_with_minima if has_minima else scaled
