"""Products of rows with a weight in blocks, in Numba: the inner loop of the decoder (`numba_decoder.py`).

A weight [N, K] is stored in blocks of a few columns of the result, [N / B, K, B], so that it is read sequentially. Sums
of up to `MOST_ROWS` rows stay in registers, and each number of the block serves them all. Weights have the type of the
checkpoint (float32, bfloat16, float16) or 8 bits with a scale for every `GROUP` numbers of a column. They are widened
to float32 in registers, and all arithmetic is float32. The weight is prefetched, because the processor does not
prefetch across its pages.

A sum starts at the bias and runs over K in order, for any number of rows and threads: results do not depend on what
else is computed with them. The loop is written as LLVM instructions, because no compiler keeps the sums of a loop over
an array in registers. `transpose` and `copy` lay out K/V in the same blocks, for attention (`numba_attention.py`).
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from engine.kernels import compiled_for_cpu

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Features of the processor for which Numba compiles: this one, or that of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
LANES = 16 if "+avx512f" in _FEATURES else 8 if "+avx2" in _FEATURES else 4
"""Numbers of a vector."""
WIDENS_HALVES = "+f16c" in _FEATURES or "+avx512f" in _FEATURES
"""Whether the processor widens float16 numbers itself; if not, such weights are stored as float32."""
_VECTORS = 2
"""Vectors of a row's sums: each number of a row is used in this many multiplications."""
BLOCK = _VECTORS * LANES
"""B, columns of a block."""
_HAS_FEW_REGISTERS = LANES < 16 and any(feature.startswith(("+sse", "+avx")) for feature in _FEATURES)
MOST_ROWS = 6 if _HAS_FEW_REGISTERS else 12
"""Rows whose sums, with a block's vectors, fit the registers: 16 of SSE and AVX2, 32 of AVX-512 and of ARM."""
MOST_BLOCKS = 4
"""Blocks that few rows process at once: sums of a single block would wait for each other."""
GROUP = 32
"""Numbers of a column of 8-bit weights that share a scale."""
_AHEAD = 32
"""Prefetch distance, in inner-loop steps."""
_LINE = 64
"""Bytes of a cache line; weights are aligned to it."""

Array = npt.NDArray[Any]

_FLOAT, _LONG, _INT, _SHORT, _BYTE = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_VECTOR = ir.VectorType(_FLOAT, LANES)


class _WeightType(NamedTuple):
    """Number format of a weight."""

    stored: Any
    """LLVM type of one number."""
    num_bytes: int

    def widen(self, builder: ir.IRBuilder, numbers: Any) -> Any:
        """Convert a vector to float32."""
        if self.stored is _SHORT:  # the upper halves of float32 numbers
            wide = builder.zext(numbers, ir.VectorType(_INT, LANES))
            return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * LANES)), _VECTOR)
        if self.stored is _BYTE:
            return builder.sitofp(builder.sext(numbers, ir.VectorType(_INT, LANES)), _VECTOR)
        return numbers if self.stored is _FLOAT else builder.fpext(numbers, _VECTOR)


_KINDS = {
    types.float32: _WeightType(_FLOAT, 4),
    types.uint16: _WeightType(_SHORT, 2),
    types.int16: _WeightType(ir.HalfType(), 2),
    types.int8: _WeightType(_BYTE, 1),
}
"""Formats by the numpy type of a weight; bfloat16 is uint16, float16 is int16."""


class _Loop:
    """Instructions that sum products of a fixed number of rows with a fixed number of blocks."""

    def __init__(
        self, builder: ir.IRBuilder, kind: _WeightType, operands: Sequence[Any], num_rows: int, num_blocks: int
    ):
        self._builder, self._kind, self._num_blocks = builder, kind, num_blocks
        rows, weight, scale, self._bias, result, row_stride, self._result_stride, self._depth = operands
        self._size = builder.mul(self._depth, _long(BLOCK))
        """Numbers of a block."""
        self._weight = builder.inttoptr(weight, kind.stored.as_pointer())
        self._scale, self._bias, self._result = (
            builder.inttoptr(one, _FLOAT.as_pointer()) for one in (scale, self._bias, result)
        )
        first = builder.inttoptr(rows, _FLOAT.as_pointer())
        self._rows = [self._offset(first, builder.mul(row_stride, _long(number))) for number in range(num_rows)]
        self._columns = [(block, vector) for block in range(num_blocks) for vector in range(_VECTORS)]

    def build(self, after: ir.Block) -> None:
        """Emit the loop at the builder's position; it jumps to `after` at the end."""
        starts = [self._at(self._bias, _long(block * BLOCK + vector * LANES)) for block, vector in self._columns]
        starts = [self._builder.load(pointer, align=4) for pointer in starts]
        sums = [starts] * len(self._rows)
        width, body = (GROUP, self._group) if self._kind.stored is _BYTE else (1, self._step)
        self._store(self._repeat(_long(0), self._depth, width, sums, body))
        self._builder.branch(after)

    def _repeat(
        self, start: Any, stop: Any, width: int, sums: list[list[Any]], body: Callable[..., list[list[Any]]]
    ) -> list[list[Any]]:
        """Return the sums after `body(step, sums)` for steps from `start` to `stop`; there is at least one."""
        builder = self._builder
        before, loop = builder.block, builder.append_basic_block("loop")
        done = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(_LONG)
        olds = [[builder.phi(_VECTOR) for _ in of_row] for of_row in sums]
        news = body(step, olds)
        following = builder.add(step, _long(width))
        step.add_incoming(start, before)
        step.add_incoming(following, builder.block)
        for old_row, first_row, new_row in zip(olds, sums, news, strict=True):
            for old, first, new in zip(old_row, first_row, new_row, strict=True):
                old.add_incoming(first, before)
                old.add_incoming(new, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, done)
        builder.position_at_end(done)
        return news

    def _group(self, start: Any, sums: list[list[Any]]) -> list[list[Any]]:
        """Return the sums after `GROUP` more numbers of K, from `start` on: the numbers that share a scale."""
        builder = self._builder
        number = builder.sdiv(start, _long(GROUP))
        num_groups = builder.sdiv(builder.add(self._depth, _long(GROUP - 1)), _long(GROUP))
        scales = []
        for block, vector in self._columns:
            of_block = builder.add(builder.mul(num_groups, _long(block)), number)
            place = builder.add(builder.mul(of_block, _long(BLOCK)), _long(vector * LANES))
            scales.append(builder.load(self._at(self._scale, place), align=4))
        end = builder.add(start, _long(GROUP))
        stop = builder.select(builder.icmp_signed("<", end, self._depth), end, self._depth)
        return self._repeat(start, stop, 1, sums, lambda step, olds: self._step(step, olds, scales))

    def _step(self, step: Any, sums: list[list[Any]], scales: Sequence[Any] = ()) -> list[list[Any]]:
        """Return the sums after index `step` of K: every row's number there is multiplied by the blocks' numbers."""
        builder = self._builder
        weights = []
        for block in range(self._num_blocks):
            place = builder.add(builder.mul(step, _long(BLOCK)), builder.mul(self._size, _long(block)))
            self._prefetch(builder.add(place, _long(_AHEAD * BLOCK)))
            for vector in range(_VECTORS):
                stored = builder.load(
                    self._at(self._weight, builder.add(place, _long(vector * LANES)), self._kind.stored),
                    align=self._kind.num_bytes,
                )
                weights.append(self._kind.widen(builder, stored))
        if scales:
            weights = [builder.fmul(weight, scale) for weight, scale in zip(weights, scales, strict=True)]
        added = []
        for pointer, of_row in zip(self._rows, sums, strict=True):
            alone = builder.insert_element(
                ir.Constant(_VECTOR, ir.Undefined), builder.load(self._offset(pointer, step)), _int(0)
            )
            number = builder.shuffle_vector(
                alone, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
            )
            added.append(
                [
                    builder.fadd(builder.fmul(number, one, flags=["contract"]), old, flags=["contract"])
                    for one, old in zip(weights, of_row, strict=True)
                ]
            )
        return added

    def _prefetch(self, place: Any) -> None:
        """Prefetch a block's next part."""
        builder = self._builder
        byte = _BYTE.as_pointer()
        name = "llvm.prefetch.p0"
        fetch = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT]), name
        )
        for line in range(0, BLOCK * self._kind.num_bytes, _LINE):
            pointer = self._offset(self._weight, builder.add(place, _long(line // self._kind.num_bytes)))
            # Hints: for reading, high locality, data.
            builder.call(fetch, [builder.bitcast(pointer, byte), _int(0), _int(3), _int(1)])

    def _store(self, sums: Sequence[Sequence[Any]]) -> None:
        builder = self._builder
        for number, of_row in enumerate(sums):
            start = builder.mul(self._result_stride, _long(number))
            for place, one in enumerate(of_row):
                builder.store(one, self._at(self._result, builder.add(start, _long(place * LANES))), align=4)

    def _offset(self, pointer: Any, count: Any) -> Any:
        return self._builder.gep(pointer, [count])

    def _at(self, pointer: Any, count: Any, stored: Any = _FLOAT) -> Any:
        vector = ir.VectorType(stored, LANES)
        return self._builder.bitcast(self._offset(pointer, count), vector.as_pointer())


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _int(value: int) -> Any:
    return ir.Constant(_INT, value)


def blocks_at_once(num_rows: int) -> int:
    """Return the number of blocks that this many rows process at once."""
    return max(1, MOST_BLOCKS // num_rows)


@intrinsic
def _sums(_context, weights, num_rows, num_blocks, rows, weight, scale, bias, result, row_stride, result_stride, depth):
    """Sum 1 to `MOST_ROWS` rows with `blocks_at_once` blocks or one, by addresses; strides count numbers.

    weights: an array of the weight's type, which is not read.
    """
    word = types.int64
    signature = types.void(weights, *[word] * 10)
    kind = _KINDS[weights.dtype]
    cases = {(rows, blocks) for rows in range(1, MOST_ROWS + 1) for blocks in (1, blocks_at_once(rows))}

    def build(context, builder, _signature, operands):
        _, count, at_once, *rest = operands
        after = builder.append_basic_block("after")
        switch = builder.switch(builder.add(builder.mul(count, _long(MOST_BLOCKS + 1)), at_once), after)
        for num_rows, num_blocks in sorted(cases):
            block = builder.append_basic_block(f"rows{num_rows}_blocks{num_blocks}")
            switch.add_case(_long(num_rows * (MOST_BLOCKS + 1) + num_blocks), block)
            builder.position_at_end(block)
            _Loop(builder, kind, rest, num_rows, num_blocks).build(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, build


_blocks_at_once = compiled_for_cpu()(blocks_at_once)


@intrinsic
def transpose(_context, numbers, offsets, source, target):
    """Write `LANES` columns of `LANES` numbers, at `source` plus offsets in bytes, as rows of a block.

    numbers: an array of their type, which is not read; offsets, source, target: addresses.
    """
    kind = _KINDS[numbers.dtype]
    low = [place for number in range(LANES // 2) for place in (number, LANES + number)]
    high = [place + LANES // 2 for place in low]

    def build(context, builder, _signature, operands):
        _, offsets, source, target = operands
        offsets = builder.inttoptr(offsets, _LONG.as_pointer())
        vectors = []
        for number in range(LANES):
            place = builder.add(source, builder.load(builder.gep(offsets, [_long(number)])))
            pointer = builder.inttoptr(place, ir.VectorType(kind.stored, LANES).as_pointer())
            vectors.append(kind.widen(builder, builder.load(pointer, align=kind.num_bytes)))
        # Every stage merges the first half with the second, number by number.
        for _ in range(LANES.bit_length() - 1):
            pairs = zip(vectors[: LANES // 2], vectors[LANES // 2 :], strict=True)
            masks = [ir.Constant(ir.VectorType(_INT, LANES), order) for order in (low, high)]
            vectors = [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in masks]
        for number, vector in enumerate(vectors):
            place = builder.add(target, _long(number * BLOCK * 4))
            builder.store(vector, builder.inttoptr(place, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, types.int64, types.int64), build


@intrinsic
def copy(_context, numbers, source, target):
    """Copy `LANES` numbers from one address to another, as float32; numbers: an array of their type, not read."""
    kind = _KINDS[numbers.dtype]

    def build(context, builder, _signature, operands):
        _, source, target = operands
        stored = builder.inttoptr(source, ir.VectorType(kind.stored, LANES).as_pointer())
        widened = kind.widen(builder, builder.load(stored, align=kind.num_bytes))
        builder.store(widened, builder.inttoptr(target, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.int64, types.int64), build


@compiled_for_cpu(error_model="numpy")
def product(rows, weights, scales, bias, result, first_block, last_block):
    """Write the products of rows [T, at least K] with these blocks of a weight to `result` [T, N] (N: whole blocks).

    weights: [N / B, K, B]; scales: [N / B, groups, B], read for 8-bit weights; bias: [N].
    """
    num_rows, stride = rows.shape
    depth = weights.shape[1]
    num_columns = result.shape[1]
    width = weights.itemsize
    from_rows, from_weights = np.int64(rows.ctypes.data), np.int64(weights.ctypes.data)
    from_scales, from_bias, to = np.int64(scales.ctypes.data), np.int64(bias.ctypes.data), np.int64(result.ctypes.data)
    scales_of_block = scales.shape[1] * scales.shape[2] * 4
    most_blocks = _blocks_at_once(num_rows)
    block = first_block
    while block < last_block:
        at_once = most_blocks if block + most_blocks <= last_block else 1
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
                from_scales + block * scales_of_block,
                from_bias + block * BLOCK * 4,
                to + (first * num_columns + block * BLOCK) * 4,
                stride,
                num_columns,
                depth,
            )
            first += count
        block += at_once
