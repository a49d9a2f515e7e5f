"""Products of rows with a weight in blocks, in Numba: the decoder's inner loop.

A weight [N, K] is stored in blocks of a few columns of the result, [N / B, K, B], so that it is
read sequentially. Sums of up to `MOST_ROWS` rows stay in registers, and each number of the block
serves them all. Weights have the type of the checkpoint (float32, bfloat16, float16), are widened
to float32 in registers, and all arithmetic is float32; weights of other types are multiplied by dot
products of the processor (`dot_products.py`). The weight is prefetched, because the processor does
not prefetch across its pages.

A sum starts at the bias and runs over K in order, for any number of rows and threads: results do
not depend on what else is computed with them. `transpose` and `copy` lay out K/V in the same
blocks, for attention (`attention_loops.py`).
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a
# list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from engine.cpu.compiled.dot_products import product_of_dots
from engine.cpu.compiled.simd_vectors import (
    BLOCK,
    FEATURES,
    FLOAT,
    INT,
    INTS,
    LANES,
    LINE,
    LONG,
    MOST_ROWS,
    SHORT,
    VECTOR,
    VECTORS,
    Emitter,
    Sums,
    blocks_at_once,
    ints,
    long,
    switch_by_size,
)
from engine.cpu.compiled.stored_words import DOT_TYPES
from engine.cpu.compiled.tile_products import product_of_tiles
from engine.cpu.compiler import compiled_for_cpu

WIDENS_HALVES = "+f16c" in FEATURES or "+avx512f" in FEATURES
"""Whether the processor widens float16; if not, such weights are stored as float32."""
_BLOCKS = [blocks_at_once(num_rows) for num_rows in range(1, MOST_ROWS + 1)]
_STEPS_AHEAD = 32

Array = npt.NDArray[Any]


class _WeightType(NamedTuple):
    """Number format of a weight."""

    stored: Any
    """LLVM type of one number."""
    num_bytes: int

    def widen(self, builder: ir.IRBuilder, numbers: Any) -> Any:
        """Convert a vector to float32."""
        if self.stored is SHORT:  # the upper halves of float32 numbers
            return builder.bitcast(builder.shl(builder.zext(numbers, INTS), ints(16)), VECTOR)
        return numbers if self.stored is FLOAT else builder.fpext(numbers, VECTOR)


_KINDS = {
    types.float32: _WeightType(FLOAT, 4),
    types.uint16: _WeightType(SHORT, 2),
    types.int16: _WeightType(ir.HalfType(), 2),
}
"""Products by the numpy type of a weight; bfloat16 is uint16, float16 is int16."""


class _Loop(Emitter):
    """Instructions that sum products of a fixed number of rows with a fixed number of blocks."""

    def __init__(
        self, builder: ir.IRBuilder, kind: _WeightType, operands: Sequence[Any], num_rows: int, num_blocks: int
    ):
        super().__init__(builder)
        self._kind = kind
        rows, weight, self._bias, self._result, row_stride, self._result_stride, self._depth = operands
        self._rows = [builder.add(rows, builder.mul(row_stride, long(number))) for number in range(num_rows)]
        size = builder.mul(self._depth, long(BLOCK * kind.num_bytes))
        self._weights = [builder.add(weight, builder.mul(size, long(block))) for block in range(num_blocks)]

    def build(self, after: ir.Block) -> None:
        """Emit the loop at the builder's position; it jumps to `after` at the end."""
        biases = self.load_columns(self._bias, len(self._weights))
        sums = self.repeat(long(0), self._depth, 1, [biases] * len(self._rows), self._step)
        self.store_rows(sums, self._result, self._result_stride)
        self.builder.branch(after)

    def _step(self, step: Any, sums: Sums) -> Sums:
        """Return the sums after index `step` of K: rows' numbers times the blocks' numbers."""
        builder = self.builder
        size = self._kind.num_bytes
        weights = []
        for weight in self._weights:
            address = builder.add(weight, builder.mul(step, long(BLOCK * size)))
            for line in range(0, BLOCK * size, LINE):
                self.prefetch(builder.add(address, long(_STEPS_AHEAD * BLOCK * size + line)))
            for vector in range(VECTORS):
                stored = self.load(ir.VectorType(self._kind.stored, LANES), address, vector * LANES * size, size)
                weights.append(self._kind.widen(builder, stored))
        added = []
        for address, row_sums in zip(self._rows, sums, strict=True):
            number = self.broadcast(self.load(FLOAT, address, builder.mul(step, long(4)), 4))
            added.append([self.multiply_add(number, one, old) for one, old in zip(weights, row_sums, strict=True)])
        return added


@intrinsic
def _sums(_context, weights, num_rows, num_blocks, rows, weight, bias, result, row_stride, result_stride, depth):
    """Sum 1 to `MOST_ROWS` rows with one block or `blocks_at_once`; strides count bytes.

    weights: an array of the weight's type, which is not read.
    """
    kind = _KINDS[weights.dtype]

    def build(context, builder, _signature, operands):
        _, count, at_once, *rest = operands
        switch_by_size(builder, count, at_once, _BLOCKS, lambda *size: _Loop(builder, kind, rest, *size))
        return context.get_dummy_value()

    return types.void(weights, *[types.int64] * 9), build


_blocks_at_once = compiled_for_cpu()(blocks_at_once)


@intrinsic
def transpose(_context, numbers, offsets, source, target):
    """Write `LANES` columns of `LANES` numbers at `source` as rows of a block.

    numbers: an array of their type, which is not read; offsets, source, target: addresses.
    """
    kind = _KINDS[numbers.dtype]
    low = [place for number in range(LANES // 2) for place in (number, LANES + number)]
    high = [place + LANES // 2 for place in low]

    def build(context, builder, _signature, operands):
        _, offsets, source, target = operands
        offsets = builder.inttoptr(offsets, LONG.as_pointer())
        vectors = []
        for number in range(LANES):
            place = builder.add(source, builder.load(builder.gep(offsets, [long(number)])))
            pointer = builder.inttoptr(place, ir.VectorType(kind.stored, LANES).as_pointer())
            vectors.append(kind.widen(builder, builder.load(pointer, align=kind.num_bytes)))
        # Every stage merges the first half with the second, number by number.
        for _ in range(LANES.bit_length() - 1):
            pairs = zip(vectors[: LANES // 2], vectors[LANES // 2 :], strict=True)
            masks = [ir.Constant(ir.VectorType(INT, LANES), order) for order in (low, high)]
            vectors = [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in masks]
        for number, vector in enumerate(vectors):
            place = builder.add(target, long(number * BLOCK * 4))
            builder.store(vector, builder.inttoptr(place, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, types.int64, types.int64), build


@intrinsic
def copy(_context, numbers, source, target):
    """Copy `LANES` numbers as float32; numbers: an array of their type, not read."""
    kind = _KINDS[numbers.dtype]

    def build(context, builder, _signature, operands):
        _, source, target = operands
        stored = builder.inttoptr(source, ir.VectorType(kind.stored, LANES).as_pointer())
        widened = kind.widen(builder, builder.load(stored, align=kind.num_bytes))
        builder.store(widened, builder.inttoptr(target, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, types.int64), build


def _multiply_by_type(rows, weights, scales, bias, result, blocks, columns):
    """Do the work of `product`, for the type of the weights."""
    raise NotImplementedError


@overload(_multiply_by_type)
def _multiply_of_type(rows, weights, scales, bias, result, blocks, columns):
    if weights.dtype in DOT_TYPES:
        return lambda rows, weights, scales, bias, result, blocks, columns: product_of_dots(
            rows, weights, scales, bias, result, blocks, columns
        )
    return lambda rows, weights, scales, bias, result, blocks, columns: _product_of_floats(
        rows, weights, bias, result, blocks, columns
    )


@compiled_for_cpu(error_model="numpy")
def product(rows, weights, scales, bias, result, blocks, columns):
    """Write products of rows [T, K] with a weight's blocks to `result` [T, N].

    weights: [N / B, K, B], or in a layout of `stored_words.py`, with its scales; bias: [N]; blocks:
    first, and end; columns: the block of the result that the weight's first block has, and the
    distance of the other blocks.
    """
    if blocks[0] >= blocks[1]:
        return
    _multiply_by_type(rows, weights, scales, bias, result, blocks, columns)


@compiled_for_cpu(error_model="numpy")
def product_on_tiles(rows, weights, scales, bias, result, blocks, columns):
    """Do the work of `product` on tiles."""
    if blocks[0] < blocks[1]:
        product_of_tiles(rows, weights, scales, bias, result, blocks, columns)


@compiled_for_cpu(error_model="numpy")
def _product_of_floats(rows, weights, bias, result, blocks, columns):
    num_rows, stride = rows.shape
    depth = weights.shape[1]
    num_columns = result.shape[1]
    width = weights.itemsize
    from_rows = np.int64(rows.ctypes.data)
    from_weights = np.int64(weights.ctypes.data)
    from_bias = np.int64(bias.ctypes.data)
    to = np.int64(result.ctypes.data)
    first_place, step = columns
    most_blocks = _blocks_at_once(num_rows) if step == 1 else 1
    block, last_block = blocks
    while block < last_block:
        at_once = most_blocks if block + most_blocks <= last_block else 1
        place = (first_place + step * block) * BLOCK
        first = 0
        while first < num_rows:
            left = num_rows - first
            # Parts of about equal size.
            num_parts = (left + MOST_ROWS - 1) // MOST_ROWS
            count = (left + num_parts - 1) // num_parts
            _sums(
                weights,
                count,
                at_once,
                from_rows + first * stride * 4,
                from_weights + block * depth * BLOCK * width,
                from_bias + place * 4,
                to + (first * num_columns + place) * 4,
                stride * 4,
                num_columns * 4,
                depth,
            )
            first += count
        block += at_once
