"""A product of few rows with a weight in blocks, in Numba, on one core: reading the weight is what it waits for.

A weight [N, K] lies in blocks of a few columns of the result, [N / B, K, B], so that a program reads it from front to
back. Sums of up to `MOST_ROWS` rows stay in registers; each number of the block that is read serves them all. What is
read soon is asked for ahead of time, as the processor does not do that across its pages. Libraries lay a weight out
anew for several rows, or read it more slowly: `packing.py` measures which of them is faster.

Float32 only. The inner loop is written as LLVM's instructions (`_sums_of_block`), because sums in registers are what no
compiler makes of a loop over an array.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels import compiled_for_cpu

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Features of the processor that Numba compiles for: this one, or the one of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
_LANES = 16 if "+avx512f" in _FEATURES else 8 if "+avx2" in _FEATURES else 4
"""Numbers of a vector."""
_VECTORS = 2
"""Of a row's sums: as many multiplications for each number of a row that is read."""
BLOCK = _VECTORS * _LANES
"""B, columns of a block."""
MOST_ROWS = 6 if _LANES == 8 else 12
"""Rows whose sums, with a block's vectors, fit the registers: 16 of eight numbers, else 32."""
_AHEAD = 32
"""So many steps before it is used, a part of the weight is asked for."""
_ALIGNMENT = 64

Rows = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.float32]
"""[N / B, K, B]."""

_FLOAT, _LONG, _INT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, _LANES)


class _Loop:
    """The instructions that sum a block's products for a fixed number of rows."""

    def __init__(self, builder: ir.IRBuilder, operands: Sequence[Any], num_rows: int) -> None:
        self._builder, self._num_rows = builder, num_rows
        rows, weight, result, row_stride, self._result_stride, self._depth = operands
        self._weight, self._result = (builder.inttoptr(one, _FLOAT.as_pointer()) for one in (weight, result))
        first = builder.inttoptr(rows, _FLOAT.as_pointer())
        self._rows = [self._behind(first, builder.mul(row_stride, _long(number))) for number in range(num_rows)]

    def build(self, after: ir.Block) -> None:
        """At the builder's place, which jumps to `after` at the end."""
        builder = self._builder
        before, loop, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        step = builder.phi(_LONG)
        sums = [[builder.phi(_VECTOR) for _ in range(_VECTORS)] for _ in range(self._num_rows)]
        added = self._step(step, sums)
        following = builder.add(step, _long(1))
        step.add_incoming(_long(0), before)
        step.add_incoming(following, loop)
        for of_row, new in zip(sums, added, strict=True):
            for old, one in zip(of_row, new, strict=True):
                old.add_incoming(ir.Constant(_VECTOR, [0.0] * _LANES), before)
                old.add_incoming(one, loop)
        builder.cbranch(builder.icmp_signed("<", following, self._depth), loop, done)
        builder.position_at_end(done)
        self._store(added)
        builder.branch(after)

    def _step(self, step: Any, sums: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The sums with the products of one number of each row."""
        builder = self._builder
        here = builder.mul(step, _long(BLOCK))
        self._ask_for(builder.add(here, _long(_AHEAD * BLOCK)))
        of_weight = [
            builder.load(self._vector(self._weight, builder.add(here, _long(number * _LANES))), align=_LANES * 4)
            for number in range(_VECTORS)
        ]
        added = []
        for pointer, of_row in zip(self._rows, sums, strict=True):
            alone = builder.insert_element(
                ir.Constant(_VECTOR, ir.Undefined), builder.load(self._behind(pointer, step)), _int(0)
            )
            number = builder.shuffle_vector(
                alone, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(ir.VectorType(_INT, _LANES), [0] * _LANES)
            )
            added.append(
                [
                    builder.fadd(builder.fmul(number, one, flags=["contract"]), old, flags=["contract"])
                    for one, old in zip(of_weight, of_row, strict=True)
                ]
            )
        return added

    def _ask_for(self, place: Any) -> None:
        """A block's next part, into the cache."""
        builder = self._builder
        byte = ir.IntType(8).as_pointer()
        name = "llvm.prefetch.p0"
        fetch = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT]), name
        )
        for line in range(0, BLOCK * 4, _ALIGNMENT):
            pointer = self._behind(self._weight, builder.add(place, _long(line // 4)))
            # To be read, soon again, as data.
            builder.call(fetch, [builder.bitcast(pointer, byte), _int(0), _int(3), _int(1)])

    def _store(self, sums: Sequence[Sequence[Any]]) -> None:
        builder = self._builder
        for number, of_row in enumerate(sums):
            start = builder.mul(self._result_stride, _long(number))
            for place, one in enumerate(of_row):
                builder.store(one, self._vector(self._result, builder.add(start, _long(place * _LANES))), align=4)

    def _behind(self, pointer: Any, count: Any) -> Any:
        return self._builder.gep(pointer, [count])

    def _vector(self, pointer: Any, count: Any) -> Any:
        return self._builder.bitcast(self._behind(pointer, count), _VECTOR.as_pointer())


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _int(value: int) -> Any:
    return ir.Constant(_INT, value)


@intrinsic
def _sums_of_block(_context, num_rows, rows, weight, result, row_stride, result_stride, depth):
    """Products of 1 to `MOST_ROWS` rows with one block, by their addresses; strides are counted in numbers."""
    word = types.int64
    signature = types.void(word, word, word, word, word, word, word)

    def build(context, builder, _signature, operands):
        after = builder.append_basic_block("after")
        switch = builder.switch(operands[0], after)
        for count in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(_long(count), block)
            builder.position_at_end(block)
            _Loop(builder, operands[1:], count).build(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, build


@compiled_for_cpu(error_model="numpy")
def _product(rows, blocks, result):
    num_rows, depth = rows.shape
    num_columns = result.shape[1]
    from_rows, from_blocks, to = np.int64(rows.ctypes.data), np.int64(blocks.ctypes.data), np.int64(result.ctypes.data)
    for number in range(len(blocks)):
        weight = from_blocks + number * depth * BLOCK * 4
        first = 0
        while first < num_rows:
            left = num_rows - first
            # Parts of about one size.
            num_parts = (left + MOST_ROWS - 1) // MOST_ROWS
            count = (left + num_parts - 1) // num_parts
            _sums_of_block(
                count,
                from_rows + first * depth * 4,
                weight,
                to + (first * num_columns + number * BLOCK) * 4,
                depth,
                num_columns,
                depth,
            )
            first += count


def takes(weight_NK: Tensor) -> bool:
    """Whether a weight can lie in blocks."""
    return weight_NK.dtype == torch.float32 and weight_NK.device.type == "cpu" and weight_NK.shape[0] % BLOCK == 0


def in_blocks(weights: Sequence[Tensor]) -> list[Blocks]:
    """Weights of one shape in blocks, in one piece of memory: the system gives large pieces large pages."""
    num_columns, depth = weights[0].shape
    size = num_columns * depth
    piece = np.empty(len(weights) * size + _ALIGNMENT // 4, dtype=np.float32)
    start = -piece.ctypes.data % _ALIGNMENT // 4
    found = []
    for weight in weights:
        blocks: Blocks = piece[start : start + size].reshape(num_columns // BLOCK, depth, BLOCK)
        blocks[:] = weight.detach().numpy().reshape(num_columns // BLOCK, BLOCK, depth).transpose(0, 2, 1)
        found.append(blocks)
        start += size
    return found


def to_weight(blocks: Blocks) -> Tensor:
    """[N, K] the weight that lies in these blocks."""
    num_blocks, depth, width = blocks.shape
    return torch.from_numpy(blocks.transpose(0, 2, 1).reshape(num_blocks * width, depth).copy())


def product(rows: Rows, blocks: Blocks) -> Rows:
    """[T, N] the products of rows [T, K], which follow each other in memory, with a weight."""
    result = np.empty((len(rows), len(blocks) * BLOCK), dtype=np.float32)
    _product(rows, blocks, result)
    return result
