"""What a decoder layer does between its products, in one Numba kernel each: for passes of few tokens on a CPU.

Kernels take arrays of numpy: float32, or the 16 bits of bfloat16 numbers, which are rounded no more often than
transformers rounds them. They run on one core and are compiled once for a machine: Numba keeps them beside this file,
or in the folder NUMBA_CACHE_DIR. `cpu_layers.py` calls them.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from engine.kernels import compiled_for_cpu

# Sums may be reordered, and a product and a sum be one operation. Numbers that are not finite stay so.
_FAST = {"fastmath": {"contract", "reassoc", "nsz", "arcp"}, "error_model": "numpy"}
_EXACT = {"fastmath": {"contract"}, "error_model": "numpy"}
_NAN = 0x7FC0
"""Of bfloat16."""


@intrinsic
def _bits_of(_context, value):
    """The bits of a float32 number."""

    def bits(_context, builder, _signature, operands):
        return builder.bitcast(operands[0], ir.IntType(32))

    return types.uint32(types.float32), bits


@intrinsic
def _of_bits(_context, bits):
    """The float32 number of these bits."""

    def number(_context, builder, _signature, operands):
        return builder.bitcast(operands[0], ir.FloatType())

    return types.float32(types.uint32), number


def _widened(value):
    """A number of an array as float32; those of bfloat16 come as 16 bits."""
    raise NotImplementedError


def _rounded(value, like):
    """A float32 number as an array of numbers like this one has it."""
    raise NotImplementedError


@overload(_widened, inline="always")
def _widened_of(value):
    if value == types.uint16:
        return lambda value: _of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


@overload(_rounded, inline="always")
def _rounded_of(value, like):
    if like == types.uint16:
        return lambda value, like: _to_bfloat16(value)
    return lambda value, like: value


@compiled_for_cpu(**_EXACT)
def _to_bfloat16(value):
    """The nearest, of two as near the even one."""
    bits = _bits_of(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(_NAN)


@compiled_for_cpu(**_EXACT)
def _exp(value):
    """e to the power of a float32 number, within two units in the last place; as e^-87 below, and e^88 above."""
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
    found = series * _of_bits(np.uint32(np.int32(power) + 127) << np.uint32(23))
    return found if value == value else value


@compiled_for_cpu(**_FAST)
def embed(token_ids, positions, embedding, frequencies, factor, hidden, cosines, sines):
    """Hidden states [T, D] of tokens, and cosines and sines [T, head] of their rotation, times a factor.

    The sines of the first half are negated: see `rotate_and_write`.
    """
    half = len(frequencies)
    for token in range(len(token_ids)):
        hidden[token] = embedding[token_ids[token]]
        for number in range(half):
            angle = np.float32(positions[token]) * frequencies[number]
            # In the precision that transformers has them in.
            cosine = _widened(_rounded(np.cos(angle) * np.float32(factor), embedding[0, 0]))
            sine = _widened(_rounded(np.sin(angle) * np.float32(factor), embedding[0, 0]))
            cosines[token, number] = cosines[token, half + number] = cosine
            sines[token, number], sines[token, half + number] = -sine, sine


@compiled_for_cpu(**_FAST)
def _norm(row, weight, eps, normed):
    """The RMS norm of a row, which may be written over it."""
    width = len(row)
    squares = np.float32(0)
    for column in range(width):
        value = _widened(row[column])
        squares += value * value
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
    for column in range(width):
        normed[column] = _rounded(_widened(row[column]) * scale * _widened(weight[column]), weight[column])


@compiled_for_cpu(**_FAST)
def add_and_norm(hidden, product, has_product, weight, eps, normed):
    """Add a product to hidden states [T, D] if there is one, and write their RMS norm."""
    num_rows, width = hidden.shape
    for row in range(num_rows):
        if has_product:
            for column in range(width):
                value = _widened(hidden[row, column]) + _widened(product[row, column])
                hidden[row, column] = _rounded(value, weight[column])
        _norm(hidden[row], weight, eps, normed[row])


@compiled_for_cpu(**_FAST)
def _rotate(head, cosines, sines, result):
    """By halves: each number meets the one at its place in the other half."""
    half = len(head) // 2
    for column in range(half):
        first, second = _widened(head[column]), _widened(head[half + column])
        turned = first * cosines[column] + second * sines[column]
        other = second * cosines[half + column] + first * sines[half + column]
        result[column] = _rounded(turned, head[column])
        result[half + column] = _rounded(other, head[column])


@compiled_for_cpu(**_FAST)
def rotate_and_write(joined, cosines, sines, has_norms, query_norm, key_norm, eps, slots, keys, values, query):
    """Rotate queries and keys, and write them, and the values.

    joined: [T, heads of q, k and v], which are normed in place if there are norms. query: [H_kv, T, G, D], the G heads
    of a K/V head together. keys, values: [slots, H_kv, D], of which those in `slots` [T] are written.
    """
    num_kv_heads, num_tokens, num_shared, width = query.shape
    num_heads = num_kv_heads * num_shared
    for token in range(num_tokens):
        slot = slots[token]
        for number in range(num_heads + num_kv_heads):
            is_query = number < num_heads
            head = joined[token, number * width : (number + 1) * width]
            if has_norms:
                _norm(head, query_norm if is_query else key_norm, eps, head)
            if is_query:
                result = query[number // num_shared, token, number % num_shared]
            else:
                result = keys[slot, number - num_heads]
            _rotate(head, cosines[token], sines[token], result)
        for number in range(num_kv_heads):
            start = (num_heads + num_kv_heads + number) * width
            values[slot, number] = joined[token, start : start + width]


@compiled_for_cpu(**_EXACT)
def _order(value):
    """An integer for a float32 number: in the order of the numbers, behind all of them what is none."""
    bits = np.int32(_bits_of(value))
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@compiled_for_cpu(**_FAST)
def softmax(scores, scale, is_masked, visible):
    """Attention weights of scores [H_kv, Q * G, K] times `scale`, in place; visible: [Q, K] which keys a query sees."""
    num_kv_heads, num_rows, num_keys = scores.shape
    num_shared = num_rows // len(visible) if is_masked else 1
    for head in range(num_kv_heads):
        for number in range(num_rows):
            row = scores[head, number]
            seen = visible[number // num_shared if is_masked else 0]
            largest = np.int32(-0x80000000)
            for key in range(num_keys):
                order = _order(row[key])
                if is_masked:
                    order = order if seen[key] else np.int32(-0x80000000)
                largest = max(largest, order)
            most = _of_bits(np.uint32(largest ^ ((largest >> np.int32(31)) & np.int32(0x7FFFFFFF))))
            total = np.float32(0)
            for key in range(num_keys):
                weight = _exp((row[key] - most) * np.float32(scale))
                if is_masked:
                    weight = weight if seen[key] else np.float32(0)
                row[key] = weight
                total += weight
            for key in range(num_keys):
                row[key] /= total


@compiled_for_cpu(**_FAST)
def merge(attended, first, result):
    """Write what Q queries give, [H_kv, Q * G, D], to the rows from `first` on of `result` [T, H * D]."""
    num_kv_heads, num_rows, width = attended.shape
    num_shared = result.shape[1] // (num_kv_heads * width)
    for head in range(num_kv_heads):
        for number in range(num_rows):
            start = (head * num_shared + number % num_shared) * width
            result[first + number // num_shared, start : start + width] = attended[head, number]


@compiled_for_cpu(**_FAST)
def gate(joined, result):
    """[T, M] silu(gate) * up of [T, 2 M]."""
    num_rows, width = result.shape
    for row in range(num_rows):
        for column in range(width):
            number = _widened(joined[row, column])
            share = np.float32(1) / (np.float32(1) + _exp(-number))
            gated = number * share * _widened(joined[row, width + column])
            result[row, column] = _rounded(gated, joined[row, column])
