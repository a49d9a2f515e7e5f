"""Numbers of float32 and bfloat16 in Numba: bits, order, exponential function."""

# Numba sees arguments only when it is run, and an intrinsic's body handles them as a list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from engine.cpu.compiler import compiled_for_cpu

FAST = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "error_model": "numpy", "forceinline": True}
"""Options of functions whose sums may be reordered. Non-finite numbers stay non-finite.

LLVM may order the sums of a function differently when it compiles the function separately and when
the function is loaded from the cache as a part of its caller. These functions are therefore inlined
into their callers: fresh and cached code compute the same numbers.
"""
EXACT = {"fastmath": {"contract"}, "error_model": "numpy"}
"""Sums keep their order."""
_NAN = 0x7FC0
"""Bits of bfloat16's NaN."""


@intrinsic
def _bits_of(_context, value):
    """Return the bits of a float32 number."""

    def bits(_context, builder, _signature, operands):
        return builder.bitcast(operands[0], ir.IntType(32))

    return types.uint32(types.float32), bits


@intrinsic
def _from_bits(_context, bits):
    """Return the float32 number with these bits."""

    def number(_context, builder, _signature, operands):
        return builder.bitcast(operands[0], ir.FloatType())

    return types.float32(types.uint32), number


@intrinsic
def _from_half(_context, bits):
    """Convert the bits of a float16 number to float32."""

    def number(_context, builder, _signature, operands):
        return builder.fpext(builder.bitcast(operands[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), number


@compiled_for_cpu(inline="always")
def number_of_half(bits):
    """Convert the bits of a finite float16 number to float32, on any processor."""
    magnitude = _from_bits(np.uint32((bits & 0x7FFF) << 13)) * np.float32(2.0**112)
    return -magnitude if bits & 0x8000 else magnitude


def widened(value):
    """Convert a number to float32; bfloat16 is stored as uint16, float16 as int16."""
    raise NotImplementedError


def rounded(value, like):
    """Convert a float32 number to the type of `like`."""
    raise NotImplementedError


@overload(widened, inline="always")
def _widened_of(value):
    if value == types.uint16:
        return lambda value: _from_bits(np.uint32(value) << np.uint32(16))
    if value == types.int16:
        return lambda value: _from_half(value)
    if value == types.int8:
        return lambda value: np.float32(value)
    return lambda value: value


@overload(rounded, inline="always")
def _rounded_of(value, like):
    if like == types.uint16:
        return lambda value, like: to_bfloat16(value)
    return lambda value, like: value


@compiled_for_cpu(**EXACT)
def to_bfloat16(value):
    """Round to the nearest number, ties to even."""
    bits = _bits_of(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(_NAN)


@compiled_for_cpu(**EXACT)
def exponential(value):
    """Return e to a float32 number from -87 to 88, within two units in the last place."""
    bounded = min(max(value, np.float32(-87)), np.float32(88))
    power = np.floor(bounded * np.float32(1.44269504) + np.float32(0.5))
    rest = bounded - power * np.float32(0.693359375) + power * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * rest * rest + rest + np.float32(1)
    power_of_2 = _from_bits(np.uint32(np.int32(power) + 127) << np.uint32(23))
    return series * power_of_2 if value == value else value


@compiled_for_cpu(**EXACT)
def order(value):
    """Map a float32 number to an integer of the same order; NaN is first or last."""
    bits = np.int32(_bits_of(value))
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@compiled_for_cpu(**EXACT)
def from_order(integer):
    """Return the number that `order` maps to this integer."""
    return _from_bits(np.uint32(integer ^ ((integer >> np.int32(31)) & np.int32(0x7FFFFFFF))))
