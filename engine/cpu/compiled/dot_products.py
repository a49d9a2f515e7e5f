"""Products by the processor's dot products, of few bits or pairs of bfloat16.

A row is rounded once, by itself (`row_rounding.py`). Sums of a group are integers, so they are
exact in any order. Each group, or each half of a group, then adds one float32 product, and a second
one if its weights have minima, in the order of K. A row's result does not depend on other rows or
cores. Layouts of weights and scales: `stored_words.py`.

x86 without such dot products multiplies halves of the bytes in 16 bits, and other processors
without them byte by byte: the sums are the same integers.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a
# list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.compiled.row_rounding import MOST_ROUNDED, round_rows
from engine.cpu.compiled.scale_vectors import ScaleLoads
from engine.cpu.compiled.simd_vectors import (
    BLOCK,
    FEATURES,
    FLOAT,
    GROUP,
    INT,
    INTS,
    LANES,
    LINE,
    SHORT,
    VECTOR,
    VECTORS,
    Emitter,
    Sums,
    ints,
    long,
    switch_by_size,
)
from engine.cpu.compiled.stored_words import Bfloat, num_parts, numbers_of_word
from engine.cpu.compiler import compiled_for_cpu

_FEATURES_OF_DOTS = {16: {"+avx512vnni"}, 8: {"+avx512vnni", "+avx512vl"}}
HAS_DOTS = LANES > 4 and (_FEATURES_OF_DOTS[LANES] <= set(FEATURES) or (LANES == 8 and "+avxvnni" in FEATURES))
"""Whether an instruction sums four products of bytes."""
HAS_PAIRS = LANES == 16 and "+avx512bf16" in FEATURES
"""Whether an instruction sums two products of bfloat16 numbers."""
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_BYTES_AHEAD = 1024
"""Prefetch distance."""
MOST_DOT_ROWS = 4 if LANES == 16 else 6
"""Rows whose sums are computed together.

With 512 bits, 4 rows x 2 blocks x 2 vectors fill the 32 registers, for a group and for all groups.
With 256 bits six rows of one block are fastest.
"""
_SHORTS = ir.VectorType(SHORT, 2 * LANES)
_PAIRS = ir.VectorType(Bfloat(), 2 * LANES)


def dots_at_once(num_rows: int) -> int:
    """Return the number of blocks that this many rows process at once."""
    return 2 if num_rows < 3 or LANES == 16 else 1


_BLOCKS = [dots_at_once(num_rows) for num_rows in range(1, MOST_DOT_ROWS + 1)]


class _Dots(Emitter):
    """Instructions that sum products of a fixed number of rows with a fixed number of blocks."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        words: Any,
        scale_type: Any,
        operands: Sequence[Any],
        num_rows: int,
        num_blocks: int,
    ) -> None:
        super().__init__(builder)
        self._words = words
        self._num_blocks = num_blocks
        self._loads = ScaleLoads(self, scale_type)
        rows, factors, corrections, weight, scale, self._bias, self._result, row_stride, group_stride = operands[:9]
        scale_stride, self._result_stride, self._num_groups = operands[9:]
        correction_stride = builder.mul(group_stride, long(self._loads.num_parts))
        self._rows = self._each(rows, row_stride, num_rows)
        self._factors = self._each(factors, group_stride, num_rows)
        self._corrections = self._each(corrections, correction_stride, num_rows)
        self._num_turns = builder.mul(self._num_groups, long(GROUP // self._numbers_of_turn))
        size = builder.mul(self._num_turns, long(self._bytes_of_turn))
        self._weights = self._each(weight, size, num_blocks)
        self._scales = self._each(scale, scale_stride, num_blocks)

    def _each(self, address: Any, stride: Any, count: int) -> list[Any]:
        """Return addresses that are `stride` bytes apart."""
        return [self.builder.add(address, self.builder.mul(stride, long(number))) for number in range(count)]

    @property
    def _numbers_of_turn(self) -> int:
        """Return the numbers of K in a turn of the loop: a group, or fewer without scales."""
        return 8 if self._words == types.uint32 else GROUP

    @property
    def _bytes_of_turn(self) -> int:
        bits = {types.int8: 8, types.uint8: 4, types.uint32: 16}[self._words]
        return self._numbers_of_turn * BLOCK * bits // 8

    def build(self, after: ir.Block) -> None:
        """Emit the loop at the builder's position; it jumps to `after` at the end."""
        biases = self.load_columns(self._bias, self._num_blocks)
        body = self._turn_of_pairs if self._words == types.uint32 else self._group_of_integers
        sums = self.repeat(long(0), self._num_turns, 1, [biases] * len(self._rows), body)
        self.store_rows(sums, self._result, self._result_stride)
        self.builder.branch(after)

    def _turn_of_pairs(self, turn: Any, sums: Sums) -> Sums:
        """Return the sums after more numbers of K, which are rounded pair by pair."""
        for step in range(self._numbers_of_turn // 2):
            weights = [self.builder.bitcast(one, _PAIRS) for one in self._next_lanes(turn, step)]
            added = []
            for address, row_sums in zip(self._rows, sums, strict=True):
                pair = self.builder.bitcast(self.broadcast(self._numbers_of(address, turn, step)), _PAIRS)
                added.append([_dot_of_pairs(self, old, pair, one) for old, one in zip(row_sums, weights, strict=True)])
            sums = added
        return sums

    def _group_of_integers(self, group: Any, sums: Sums) -> Sums:
        """Return the sums after `GROUP` more numbers of K, by parts that share a scale."""
        num_parts = self._loads.num_parts
        steps_of_part = GROUP // (8 if self._words == types.uint8 else 4) // num_parts
        for part in range(num_parts):
            place = self.builder.mul(group, long(4 * num_parts))
            offset = self.builder.add(place, long(4 * part))
            corrections = [self.load(INT, address, offset) for address in self._corrections]
            steps = range(part * steps_of_part, (part + 1) * steps_of_part)
            totals = self._totals(group, steps, corrections)
            sums = self._add_scaled(group, part, corrections, totals, sums)
        return sums

    def _totals(self, group: Any, steps: range, corrections: Sequence[Any]) -> Sums:
        """Return the integer sums of a part of a group.

        Without minima they start at the corrections for the offset of stored weights.
        """
        builder = self.builder
        num_columns = self._num_blocks * VECTORS
        firsts = [ints(0) if self._loads.has_minima else self.broadcast(one) for one in corrections]
        totals = [[first] * num_columns for first in firsts]
        for step in steps:
            lanes = self._next_lanes(group, step)
            if self._words == types.uint8:
                low = [builder.and_(one, ints(0x0F0F0F0F)) for one in lanes]
                high = [builder.and_(builder.lshr(one, ints(4)), ints(0x0F0F0F0F)) for one in lanes]
                totals = self._add_dots(group, 2 * step, low, totals)
                totals = self._add_dots(group, 2 * step + 1, high, totals)
            else:
                totals = self._add_dots(group, step, lanes, totals)
        return totals

    def _add_scaled(self, group: Any, part: int, corrections: Sequence[Any], totals: Sums, sums: Sums) -> Sums:
        """Return the sums after the totals of a part of a group."""
        builder = self.builder
        scalings = [self._loads.load(one, group, part, vector) for one in self._scales for vector in range(VECTORS)]
        added = []
        for address, correction, row_totals, old_row in zip(self._factors, corrections, totals, sums, strict=True):
            factor = self.load(FLOAT, address, builder.mul(group, long(4)))
            factors = self.broadcast(factor)
            news = [
                self.multiply_add(builder.fmul(one.scale, factors), builder.sitofp(total, VECTOR), old)
                for one, total, old in zip(scalings, row_totals, old_row, strict=True)
            ]
            if self._loads.has_minima:  # the correction is the sum of the row's bytes
                share = self.broadcast(builder.fmul(factor, builder.sitofp(correction, FLOAT)))
                news = [self.multiply_add(one.minimum, share, new) for one, new in zip(scalings, news, strict=True)]
            added.append(news)
        return added

    def _add_dots(self, group: Any, step: int, lanes: Sequence[Any], totals: Sums) -> Sums:
        """Return the totals of a group after four more numbers of K."""
        added = []
        for address, row_sums in zip(self._rows, totals, strict=True):
            four = self.broadcast(self._numbers_of(address, group, step))
            added.append([dot(self, old, weight, four) for old, weight in zip(row_sums, lanes, strict=True)])
        return added

    def _numbers_of(self, address: Any, turn: Any, step: int) -> Any:
        """Return four bytes of a row: four numbers, or a pair."""
        width = 2 if self._words == types.uint32 else 1
        place = self.builder.mul(turn, long(self._numbers_of_turn * width))
        return self.load(INT, address, self.builder.add(place, long(4 * step)))

    def _next_lanes(self, turn: Any, step: int) -> list[Any]:
        """Return vectors with the next 32 bits of every column, in a lane of 32 bits for each."""
        lanes = []
        place = self.builder.add(self.builder.mul(turn, long(self._bytes_of_turn)), long(step * BLOCK * 4))
        for weight in self._weights:
            address = self.builder.add(weight, place)
            for line in range(0, BLOCK * 4, LINE):
                self.prefetch(self.builder.add(address, long(_BYTES_AHEAD + line)))
            lanes += [self.load(INTS, address, vector * LANES * 4) for vector in range(VECTORS)]
        return lanes


def dot(emitter: Emitter, old: Any, weights: Any, row: Any) -> Any:
    """Return old sums plus four products of unsigned with signed bytes, in each lane."""
    if HAS_DOTS:
        return emitter.call(f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", INTS, old, weights, row)
    if _IS_X86:
        return _dot_of_halves(emitter, old, weights, row)
    builder = emitter.builder
    for place in range(0, 32, 8):
        weight = builder.and_(builder.lshr(weights, ints(place)), ints(255))
        number = builder.ashr(builder.shl(row, ints(24 - place)), ints(24))
        old = builder.add(old, builder.mul(weight, number))
    return old


def _dot_of_pairs(emitter: Emitter, old: Any, row: Any, weights: Any) -> Any:
    """Return old sums plus two products of bfloat16 numbers, in each lane of 32 bits."""
    return emitter.call("llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, old, row, weights)


def _dot_of_halves(emitter: Emitter, old: Any, weights: Any, row: Any) -> Any:
    """Sum products of even and of odd bytes in 16 bits each, which cannot overflow."""
    builder = emitter.builder
    name = {16: "avx512.pmaddw.d.512", 8: "avx2.pmadd.wd", 4: "sse2.pmadd.wd"}[LANES]
    eight = ir.Constant(_SHORTS, [8] * 2 * LANES)
    weights = builder.bitcast(weights, _SHORTS)
    row = builder.bitcast(row, _SHORTS)
    even = builder.and_(weights, ir.Constant(_SHORTS, [255] * 2 * LANES)), builder.ashr(builder.shl(row, eight), eight)
    odd = builder.lshr(weights, eight), builder.ashr(row, eight)
    for pair in (even, odd):
        old = builder.add(old, emitter.call(f"llvm.x86.{name}", INTS, *pair))
    return old


_blocks_at_once = compiled_for_cpu()(dots_at_once)


@intrinsic
def _sums_of_dots(
    _context,
    weights,
    scales,
    num_rows,
    num_blocks,
    rows,
    factors,
    corrections,
    weight,
    scale,
    bias,
    result,
    row_stride,
    group_stride,
    scale_stride,
    result_stride,
    num_groups,
):
    """Sum 1 to `MOST_DOT_ROWS` rows with one block or `dots_at_once`; strides count bytes.

    weights, scales: arrays of the weight's words and scales, which are not read.
    """
    kinds = weights.dtype, scales.dtype

    def build(context, builder, _signature, operands):
        _, _, count, at_once, *rest = operands
        switch_by_size(builder, count, at_once, _BLOCKS, lambda *size: _Dots(builder, *kinds, rest, *size))
        return context.get_dummy_value()

    return types.void(weights, scales, *[types.int64] * 14), build


@compiled_for_cpu(error_model="numpy")
def product_of_dots(rows, weights, scales, bias, result, blocks, columns):
    """Write products of rows [T, K] with a weight's blocks to `result` [T, N].

    weights, scales: in the layouts of `stored_words.py`; bias: [N];
    blocks, columns: see `block_products.product`.
    """
    num_groups = weights.shape[1] * numbers_of_word(weights) // GROUP
    for first in range(0, len(rows), MOST_ROUNDED):
        last = min(len(rows), first + MOST_ROUNDED)
        rounded = np.empty((last - first, num_groups, GROUP * min(2, weights.itemsize)), np.int8)
        factors = np.empty((last - first, num_groups), np.float32)
        corrections = np.empty((last - first, num_groups, num_parts(scales)), np.int32)
        round_rows(rows[first:last], weights, scales, rounded, factors, corrections)
        _multiply_rounded(rounded, factors, corrections, weights, scales, bias, result[first:last], blocks, columns)


@compiled_for_cpu(error_model="numpy")
def _multiply_rounded(rounded, factors, corrections, weights, scales, bias, result, blocks, columns):
    """Write the products of rounded rows with blocks of a weight."""
    num_rows, num_groups, size = rounded.shape
    num_columns, (first_place, step) = result.shape[1], columns
    bytes_of_block = weights.shape[1] * BLOCK * weights.itemsize
    bytes_of_scales = scales.shape[1] * scales.shape[2] * scales.itemsize
    most_blocks = _blocks_at_once(num_rows) if step == 1 else 1
    block, last_block = blocks
    while block < last_block:
        at_once = most_blocks if block + most_blocks <= last_block else 1
        place = (first_place + step * block) * BLOCK
        first = 0
        while first < num_rows:
            left = num_rows - first
            # Parts of about equal size.
            num_turns = (left + MOST_DOT_ROWS - 1) // MOST_DOT_ROWS
            count = (left + num_turns - 1) // num_turns
            _sums_of_dots(
                weights,
                scales,
                count,
                at_once,
                np.int64(rounded.ctypes.data) + first * num_groups * size,
                np.int64(factors.ctypes.data) + first * num_groups * 4,
                np.int64(corrections.ctypes.data) + first * num_groups * num_parts(scales) * 4,
                np.int64(weights.ctypes.data) + block * bytes_of_block,
                np.int64(scales.ctypes.data) + block * bytes_of_scales,
                np.int64(bias.ctypes.data) + place * 4,
                np.int64(result.ctypes.data) + (first * num_columns + place) * 4,
                num_groups * size,
                num_groups * 4,
                bytes_of_scales,
                num_columns * 4,
                num_groups,
            )
            first += count
        block += at_once
