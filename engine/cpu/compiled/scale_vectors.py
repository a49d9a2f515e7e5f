"""Vectors of scales of weights in few bits, as LLVM instructions."""

# mypy: disable-error-code="no-any-unimported, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from engine.cpu.compiled.simd_vectors import (
    BLOCK,
    BYTE,
    FEATURES,
    FLOAT,
    GROUP,
    INTS,
    LANES,
    SHORT,
    VECTOR,
    Emitter,
    ints,
    long,
)
from engine.cpu.compiled.stored_words import MINIMA, RECORD, num_parts_of

_WIDENS_HALVES = "+f16c" in FEATURES or "+avx512f" in FEATURES
_GROUPS = RECORD // GROUP
"""Groups of a record."""


class Scaling(NamedTuple):
    """Vectors of columns for a part of a group."""

    scale: Any
    minimum: Any
    """None if numbers have no minima."""


class ScaleLoads:
    """Loads scales at the position of an emitter's builder."""

    def __init__(self, emitter: Emitter, kind: Any) -> None:
        """kind: Numba's type of the scales."""
        self._emitter = emitter
        self._kind = kind
        self.num_parts = num_parts_of(kind)
        self.has_minima = kind in MINIMA

    def load(self, address: Any, group: Any, part: int, vector: int) -> Scaling:
        """Return the scaling of a block's columns in a vector; address: of the block's scales."""
        if self._kind == types.float32:
            return Scaling(self._emitter.load(VECTOR, self._place(address, group, 4 * BLOCK), 4 * LANES * vector), None)
        if self._kind == types.int16:
            return Scaling(self._halves(self._place(address, group, 2 * BLOCK), vector), None)
        if self._kind == types.uint16:
            place = self._place(address, group, 4 * BLOCK)
            return Scaling(self._halves(place, vector), self._halves(place, vector + BLOCK // LANES))
        return self._of_record(address, group, part, vector)

    def _of_record(self, address: Any, group: Any, part: int, vector: int) -> Scaling:
        builder = self._emitter.builder
        size = 20 * BLOCK if self.has_minima else 18 * BLOCK
        record = self._place(address, builder.lshr(group, long(_GROUPS.bit_length() - 1)), size)
        place = self._place(record, builder.and_(group, long(_GROUPS - 1)), self.num_parts * BLOCK)
        first = (4 if self.has_minima else 2) * BLOCK + part * BLOCK
        scale = builder.fmul(self._halves(record, vector), self._bytes(place, first, vector))
        if not self.has_minima:
            return Scaling(scale, None)
        factor = self._halves(record, vector + BLOCK // LANES)
        return Scaling(scale, builder.fmul(factor, self._bytes(place, first + _GROUPS * BLOCK, vector)))

    def _place(self, address: Any, number: Any, size: int) -> Any:
        builder = self._emitter.builder
        return builder.add(address, builder.mul(number, long(size)))

    def _halves(self, address: Any, vector: int) -> Any:
        """Load float16 numbers as float32."""
        builder = self._emitter.builder
        bits = self._emitter.load(ir.VectorType(SHORT, LANES), address, 2 * LANES * vector)
        if _WIDENS_HALVES:
            return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
        wide = builder.zext(bits, INTS)
        magnitude = builder.bitcast(builder.shl(builder.and_(wide, ints(0x7FFF)), ints(13)), VECTOR)
        magnitude = builder.fmul(magnitude, ir.Constant(VECTOR, [ir.Constant(FLOAT, 2.0**112)] * LANES))
        sign = builder.shl(builder.and_(wide, ints(0x8000)), ints(16))
        return builder.bitcast(builder.or_(builder.bitcast(magnitude, INTS), sign), VECTOR)

    def _bytes(self, address: Any, first: int, vector: int) -> Any:
        """Load bytes as float32, signed if there are no minima."""
        builder = self._emitter.builder
        numbers = self._emitter.load(ir.VectorType(BYTE, LANES), address, first + LANES * vector)
        if self.has_minima:
            return builder.uitofp(builder.zext(numbers, INTS), VECTOR)
        return builder.sitofp(builder.sext(numbers, INTS), VECTOR)
