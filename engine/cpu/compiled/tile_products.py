"""Products on the processor's tiles (Intel's AMX) with weights in pairs of bfloat16, in Numba.

A tile has up to 16 rows of 64 bytes. A tile of rows has 32 numbers of up to 16 rows of the product,
a tile of weights has 16 columns of a block, and a tile of sums has up to 16 rows of 16 columns.
Sums start at the bias and stay in their tile for all of K. One loop serves all numbers of rows,
because the number of rows is in the configuration of the tiles.

The bits of a row do not depend on other rows. They differ from those of dot products
(`dot_products.py`), so a process uses tiles for all its pairs or for none (`tiles.py`).
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

from engine.cpu.compiled.row_rounding import MOST_ROUNDED, round_rows
from engine.cpu.compiled.simd_vectors import BLOCK, BYTE, FEATURES, GROUP, LANES, LINE, VECTORS, Emitter, Sums, long
from engine.cpu.compiler import compiled_for_cpu

HAS_TILES = LANES == 16 and {"+amx-tile", "+amx-bf16"} <= set(FEATURES)
"""Whether the processor multiplies tiles of bfloat16 numbers. The system must permit it, too."""
_TILE_ROWS = 16
_BYTES_AHEAD = 2048
"""Prefetch distance."""
_ROW_TILE = 4
_WEIGHT_TILE = 6
"""First tile of rows and of weights, of two each. The tiles before are sums."""
_LOOPS = ((1, 1), (1, 2), (2, 1))
"""Tiles of rows and blocks that a loop multiplies: two or four tiles of sums."""


class _Tiles(Emitter):
    """Emits instructions on tiles. Tiles are named by constants, so they need no type."""

    def on_tiles(self, name: str, *operands: Any) -> None:
        """Call an operation; an operand that is a Python number names a tile."""
        values = [ir.Constant(BYTE, one) if isinstance(one, int) else one for one in operands]
        self.call(f"llvm.x86.{name}", ir.VoidType(), *values)

    def load_tile(self, tile: int, address: Any, stride: Any) -> None:
        """Load rows of a tile that are `stride` bytes apart."""
        self.on_tiles("tileloadd64", tile, self.pointer(address), stride)

    def pointer(self, address: Any) -> Any:
        """Return a pointer to an address."""
        return self.builder.inttoptr(address, BYTE.as_pointer())


class _PairSums(_Tiles):
    """Instructions that sum all of K of one or two tiles of rows with one or two blocks."""

    def __init__(self, builder: ir.IRBuilder, operands: Sequence[Any], num_row_tiles: int, num_blocks: int) -> None:
        super().__init__(builder)
        self._row_tiles = range(num_row_tiles)
        self._vectors = [(block, vector) for block in range(num_blocks) for vector in range(VECTORS)]
        self._rows, self._weight, self._bias, self._result, *sizes = operands
        self._group_stride, self._result_stride, self._num_groups, self._num_first = sizes

    def build(self, after: ir.Block) -> None:
        """Emit the loop at the builder's position; it jumps to `after` at the end."""
        for tile in self._row_tiles:
            for place in range(len(self._vectors)):
                bias = self.builder.add(self._bias, long(LINE * place))
                self.load_tile(self._sums(tile, place), bias, long(0))
        self.repeat(long(0), self._num_groups, 1, [], self._add_group)
        second = self.builder.mul(self._num_first, self._result_stride)
        for tile in self._row_tiles:
            result = self.builder.add(self._result, second) if tile else self._result
            for place in range(len(self._vectors)):
                address = self.builder.add(result, long(LINE * place))
                self.on_tiles("tilestored64", self._sums(tile, place), self.pointer(address), self._result_stride)
        self.builder.branch(after)

    def _sums(self, tile: int, place: int) -> int:
        """Return the tile of sums of a tile of rows and a vector of columns."""
        return tile * len(self._vectors) + place

    def _add_group(self, group: Any, sums: Sums) -> Sums:
        """Add the products of `GROUP` numbers of K."""
        builder = self.builder
        rows = builder.add(self._rows, builder.mul(group, self._group_stride))
        second = builder.mul(self._num_first, long(LINE))
        for tile in self._row_tiles:
            self.load_tile(_ROW_TILE + tile, builder.add(rows, second) if tile else rows, long(LINE))
        block_size = builder.mul(self._num_groups, long(2 * GROUP * BLOCK))
        for place, (block, vector) in enumerate(self._vectors):
            offset = builder.add(builder.mul(group, long(2 * GROUP * BLOCK)), long(LINE * vector))
            weight = builder.add(builder.add(self._weight, offset), builder.mul(block_size, long(block)))
            for pair in range(GROUP // 2):
                self.prefetch(builder.add(weight, long(_BYTES_AHEAD + VECTORS * LINE * pair)))
            tile_of_weights = _WEIGHT_TILE + place % 2
            self.load_tile(tile_of_weights, weight, long(VECTORS * LINE))
            for tile in self._row_tiles:
                self.on_tiles("tdpbf16ps", self._sums(tile, place), _ROW_TILE + tile, tile_of_weights)
        return sums


@intrinsic
def _sum_pairs(
    _context,
    num_row_tiles,
    num_blocks,
    rows,
    weight,
    bias,
    result,
    group_stride,
    result_stride,
    num_groups,
    num_first,
):
    """Sum the configured numbers of rows with one or two blocks, by addresses; strides count bytes.

    num_first: rows of the first tile.
    """

    def build(context, builder, _signature, operands):
        count, at_once, *rest = operands
        after = builder.append_basic_block("after")
        switch = builder.switch(builder.add(builder.mul(count, long(4)), at_once), after)
        for sizes in _LOOPS:
            block = builder.append_basic_block(f"tiles{sizes[0]}_blocks{sizes[1]}")
            switch.add_case(long(4 * sizes[0] + sizes[1]), block)
            builder.position_at_end(block)
            _PairSums(builder, rest, *sizes).build(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), build


@intrinsic
def _load_configuration(_context, address):
    """Configure the tiles of this core by the 64 bytes at an address."""

    def build(context, builder, _signature, operands):
        tiles = _Tiles(builder)
        tiles.on_tiles("ldtilecfg", tiles.pointer(operands[0]))
        return context.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def _release(_context):
    """Release the tiles: until then each switch of threads saves all of them."""

    def build(context, builder, _signature, _operands):
        _Tiles(builder).on_tiles("tilerelease")
        return context.get_dummy_value()

    return types.void(), build


@compiled_for_cpu()
def _configure(configuration, num_first, num_second):
    """Configure tiles for the rows of a first tile, and of a second one if it has any.

    configuration: [64] bytes: the palette, from 16 on the bytes of a row of each tile in two bytes,
    from 48 on the rows of each tile.
    """
    configuration[:] = 0
    configuration[0] = 1
    for tile in range(8):
        is_of_second = num_second > 0 and tile in (2, 3, _ROW_TILE + 1)
        num_rows = num_second if is_of_second else num_first
        configuration[16 + 2 * tile] = LINE
        configuration[48 + tile] = GROUP // 2 if tile >= _WEIGHT_TILE else num_rows
    _load_configuration(np.int64(configuration.ctypes.data))


@compiled_for_cpu()
def _aligned(num_bytes):
    """Return memory that begins at a cache line."""
    memory = np.empty(num_bytes + LINE, np.int8)
    start = -np.int64(memory.ctypes.data) % LINE
    return memory[start : start + num_bytes]


@compiled_for_cpu(error_model="numpy")
def product_of_tiles(rows, weights, scales, bias, result, blocks, columns):
    """Write the products of rows [T, K] with blocks of a weight in pairs to `result` [T, N].

    The arguments are those of `block_products.product`.
    """
    num_groups = 2 * weights.shape[1] // GROUP
    # Pairs have no factors and no corrections.
    nothing = np.empty((MOST_ROUNDED, 0), np.float32)
    no_corrections = np.empty((MOST_ROUNDED, 0, 0), np.int32)
    for first in range(0, len(rows), MOST_ROUNDED):
        last = min(len(rows), first + MOST_ROUNDED)
        # A tile of rows is contiguous. In the layout [rows, groups, bytes] its rows would share one
        # set of the L1 cache for some K.
        rounded = _aligned(num_groups * (last - first) * LINE).reshape(num_groups, last - first, LINE)
        round_rows(rows[first:last], weights, scales, rounded.transpose(1, 0, 2), nothing, no_corrections)
        _multiply_rounded(rounded, weights, bias, result[first:last], blocks, columns)
    _release()


@compiled_for_cpu(error_model="numpy")
def _multiply_rounded(rounded, weights, bias, result, blocks, columns):
    """Write the products of rounded rows [groups, T, bytes] with blocks of a weight."""
    num_groups, num_rows, _ = rounded.shape
    configuration = np.empty(64, np.uint8)
    bytes_of_block = weights.shape[1] * BLOCK * weights.itemsize
    first_place, step = columns
    block, last_block = blocks
    num_parts = (num_rows + 2 * _TILE_ROWS - 1) // (2 * _TILE_ROWS)
    counts = 0, 0
    while block < last_block:
        is_pair_of_blocks = num_rows <= _TILE_ROWS and step == 1 and block + 2 <= last_block
        num_blocks = 2 if is_pair_of_blocks else 1
        place = (first_place + step * block) * BLOCK
        for part in range(num_parts):
            first = part * num_rows // num_parts
            count = (part + 1) * num_rows // num_parts - first
            num_first = count if count <= _TILE_ROWS else (count + 1) // 2
            if counts != (num_first, count - num_first):
                counts = num_first, count - num_first
                _configure(configuration, *counts)
            # Addresses are read here, because Numba frees an array after its last use.
            _sum_pairs(
                1 if count == num_first else 2,
                num_blocks,
                np.int64(rounded.ctypes.data) + first * LINE,
                np.int64(weights.ctypes.data) + block * bytes_of_block,
                np.int64(bias.ctypes.data) + place * 4,
                np.int64(result.ctypes.data) + (first * result.shape[1] + place) * 4,
                num_rows * LINE,
                result.shape[1] * 4,
                num_groups,
                num_first,
            )
        block += num_blocks
