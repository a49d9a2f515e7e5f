"""Rows rounded for dot products, each by itself.

Rows are rounded to 8 bits, with a scale for every `GROUP` of their numbers, or to bfloat16 for
weights in pairs of it.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a
# list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.compiled.floats import FAST
from engine.cpu.compiled.simd_vectors import BYTE, FLOAT, GROUP, INT, INTS, LANES, VECTOR, Emitter, ints
from engine.cpu.compiled.stored_words import Bfloat, num_parts_of, offset_of
from engine.cpu.compiler import compiled_for_cpu

_LEAST = 2.0**-100
"""A group whose largest magnitude is below it becomes zeros."""
MOST_ROUNDED = 96
"""Rows that are rounded together: they stay in a cache."""
_ROUND = f"llvm.lrint.v{LANES}i32.v{LANES}f32"


@intrinsic
def _round_group(_context, weights, scales, numbers, target, factor, corrections):
    """Round `GROUP` float32 numbers for weights of a type.

    weights, scales: arrays of the weight, which are not read. All other arguments are addresses.
    """
    words = weights.dtype
    kind = scales.dtype

    def build(context, builder, _signature, operands):
        _, _, numbers, target, factor, corrections = operands
        emitter = Emitter(builder)
        vectors = [emitter.load(VECTOR, numbers, 4 * place) for place in range(0, GROUP, LANES)]
        if words == types.uint32:
            _round_to_pairs(emitter, vectors, target)
        else:
            rounded = _round_to_bytes(emitter, vectors, target, factor)
            _write_corrections(emitter, rounded, corrections, offset_of(words, kind), num_parts_of(kind))
        return context.get_dummy_value()

    return types.void(weights, scales, *[types.int64] * 4), build


def _round_to_pairs(emitter: Emitter, vectors: Sequence[Any], target: Any) -> None:
    """Round numbers to bfloat16."""
    for place, one in enumerate(vectors):
        emitter.store(emitter.builder.fptrunc(one, ir.VectorType(Bfloat(), LANES)), target, 2 * LANES * place)


def _round_to_bytes(emitter: Emitter, vectors: Sequence[Any], target: Any, factor: Any) -> list[Any]:
    """Round numbers to bytes, write their scale, and return them as integers.

    NaN and infinity make the scale NaN or infinite, and so all results of the row.
    """
    builder = emitter.builder
    # As unsigned integers, magnitudes have the order of the numbers, and NaN is the largest.
    magnitudes = [builder.and_(builder.bitcast(one, INTS), ints(0x7FFFFFFF)) for one in vectors]
    most = builder.bitcast(_reduced(emitter, "umax", magnitudes), FLOAT)
    is_zero = builder.fcmp_ordered("<", most, ir.Constant(FLOAT, _LEAST))
    share = builder.fdiv(ir.Constant(FLOAT, 127.0), most)
    share = emitter.broadcast(builder.select(is_zero, ir.Constant(FLOAT, 0.0), share))
    rounded = [emitter.call(_ROUND, INTS, builder.fmul(one, share)) for one in vectors]
    for place, one in enumerate(rounded):
        emitter.store(builder.trunc(one, ir.VectorType(BYTE, LANES)), target, LANES * place)
    emitter.store(builder.fdiv(most, ir.Constant(FLOAT, 127.0)), factor)
    return rounded


def _write_corrections(emitter: Emitter, rounded: Sequence[Any], corrections: Any, offset: int, num_parts: int) -> None:
    """Write the number that corrects the sum of products of each part of a group.

    If stored weights have an offset, the correction is minus the offset, times the sum of the row's
    bytes. If they have minima, it is the sum of the bytes, which the minima multiply.
    """
    size = len(rounded) // num_parts
    for part in range(num_parts):
        total = _reduced(emitter, "add", rounded[part * size : (part + 1) * size])
        total = emitter.builder.mul(total, ir.Constant(INT, -offset)) if offset else total
        emitter.store(total, corrections, 4 * part)


def _reduced(emitter: Emitter, operation: str, vectors: Sequence[Any]) -> Any:
    """Reduce vectors of integers to one number, their sum or the largest."""
    builder = emitter.builder
    joined, *others = vectors
    for other in others:
        is_more = builder.icmp_unsigned(">", other, joined)
        joined = builder.add(joined, other) if operation == "add" else builder.select(is_more, other, joined)
    return emitter.call(f"llvm.vector.reduce.{operation}.v{LANES}i32", INT, joined)


@compiled_for_cpu(error_model="numpy")
def round_rows(rows, weights, scales, rounded, factors, corrections):
    """Round rows [T, K] group by group; a last part of a group is filled up with zeros.

    rounded: [T, groups, bytes], in any order in memory.
    """
    num_groups = rounded.shape[1]
    bytes_of_group = rounded.strides[1]
    num_whole, rest = rows.shape[1] // GROUP, rows.shape[1] % GROUP
    bytes_of_corrections = corrections.shape[2] * 4
    tail = np.zeros(GROUP, np.float32)
    for row in range(len(rows)):
        tail[:rest] = rows[row, num_whole * GROUP :]
        source = np.int64(rows[row].ctypes.data)
        target = np.int64(rounded[row].ctypes.data)
        to_factors = np.int64(factors[row].ctypes.data)
        to_corrections = np.int64(corrections[row].ctypes.data)
        for group in range(num_groups):
            numbers = source + group * GROUP * 4 if group < num_whole else np.int64(tail.ctypes.data)
            to_factor = to_factors + group * 4
            to_correction = to_corrections + group * bytes_of_corrections
            _round_group(weights, scales, numbers, target + group * bytes_of_group, to_factor, to_correction)


@compiled_for_cpu(**FAST)
def _error(group, scale):
    """Return the squared error of a group's numbers in 4 bits with a scale."""
    share = np.float32(1) / scale
    total = np.float32(0)
    for place in range(GROUP):
        number = np.float32(np.rint(group[place] * share))
        difference = min(max(number, np.float32(-8)), np.float32(7)) * scale - group[place]
        total += difference * difference
    return total


@compiled_for_cpu(error_model="numpy", nogil=True)
def best_scales(groups):
    """Return [N] scales of groups [N, `GROUP`]: the best of twenty in 4 bits.

    With these scales the largest number of a group becomes a number from -8.4 to
    -7.5, or from 5.8 to 7.2, before it is cut off at -8 or 7.
    """
    scales = np.zeros(len(groups), np.float32)
    for number in range(len(groups)):
        group = groups[number]
        most, total = np.float32(0), np.float32(0)
        for place in range(GROUP):
            if abs(group[place]) > abs(most):
                most = group[place]
            total += group[place] * np.float32(0)
        if abs(most) < _LEAST and total == 0:
            continue
        # NaN if a number is not finite: the weights must not become zeros silently.
        scales[number] = most / np.float32(-8) + total
        least = np.float32(np.inf)
        for step in range(20):
            divisor = np.float32(-8.4 + 0.1 * step if step < 10 else 5.8 + 0.15 * (step - 10))
            error = _error(group, most / divisor)
            if error < least:
                least = error
                scales[number] = most / divisor + total
    return scales
