"""Words of weights that are multiplied by dot products (`numba_dot.py`): which numbers a word has, and where.

Weights in blocks [N / B, words, B], by the numpy type of their words:
- int8: bytes [K / 4, B, 4], stored plus 128;
- uint8: nibbles, stored plus 8: a byte has one of four numbers of K, and in its upper half one of the next four;
- uint32: pairs of bfloat16 numbers, [K / 2, B, 2].

K is padded with zeros to whole groups. Scales of bytes and nibbles are [N / B, K / `GROUP`, B].
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from engine.kernels.numba_numbers import widened
from engine.models.numba_vectors import BLOCK

DOT_TYPES = (types.int8, types.uint8, types.uint32)
"""Types of the words of weights that are multiplied here."""
OFFSETS = {types.int8: 128, types.uint8: 8}
"""Numbers that are added to stored weights, by the type of their words."""


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
    """Return how many numbers of K a word of a column has."""
    raise NotImplementedError


@overload(numbers_of_word, inline="always")
def _numbers_of_word(weights):
    count = 1 if weights.dtype == types.int8 else 2
    return lambda weights: count


def number_of(weights, block, number, column):
    """Return number `number` of K of a column, without its scale."""
    raise NotImplementedError


@overload(number_of, inline="always")
def _number_of(weights, block, number, column):
    if weights.dtype == types.uint32:
        return lambda weights, block, number, column: widened(
            np.uint16(weights[block, number // 2, column] >> np.uint32(16 * (number % 2)))
        )
    if weights.dtype not in DOT_TYPES:
        return lambda weights, block, number, column: widened(weights[block, number, column])
    offset, numbers_per_word = OFFSETS[weights.dtype], 4 if weights.dtype == types.int8 else 8

    def number_in_bytes(weights, block, number, column):
        place = (number // numbers_per_word * BLOCK + column) * 4 + number % 4
        stored = np.int64(weights[block, place // BLOCK, place % BLOCK]) & 255
        if numbers_per_word == 8:
            stored = (stored >> (number // 4 % 2 * 4)) & 15
        return np.float32(stored - offset)

    return number_in_bytes
