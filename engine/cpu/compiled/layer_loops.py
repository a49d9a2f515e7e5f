"""Operations of the CPU's decoder between the products of a layer, on single rows."""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import numpy as np

from engine.cpu.compiled.floats import FAST, exponential, rounded
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.compiled.stored_words import value_of
from engine.cpu.compiler import compiled_for_cpu


@compiled_for_cpu(**FAST)
def embed(token, weights, scales, row):
    """Read the embedding [D] of a token from blocks like those of a product."""
    block, column = token // BLOCK, token % BLOCK
    for number in range(len(row)):
        row[number] = value_of(weights, scales, block, number, column)


@compiled_for_cpu(**FAST)
def norm(row, weight, eps, normed):
    """Compute the RMS norm of a row, in place if `normed` is the row."""
    width = len(row)
    squares = np.float32(0)
    for column in range(width):
        squares += row[column] * row[column]
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
    for column in range(width):
        normed[column] = row[column] * scale * weight[column]


@compiled_for_cpu(**FAST)
def turn(head, cosines, sines):
    """Rotate a head [D] by halves: the numbers at the same place of both halves are a pair."""
    half = len(head) // 2
    for column in range(half):
        first, second = head[column], head[half + column]
        head[column] = first * cosines[column] - second * sines[column]
        head[half + column] = second * cosines[column] + first * sines[column]


@compiled_for_cpu(**FAST)
def store(numbers, place):
    """Write float32 numbers in the type of K/V."""
    for column in range(len(numbers)):
        place[column] = rounded(numbers[column], place[column])


@compiled_for_cpu(**FAST)
def turn_and_store(joined, num_heads, norms, has_norms, eps, turns, places):
    """Normalise and rotate a row of q, k and v, and store its keys and values.

    norms: [1, 2, D] of queries and of keys, or [0, 2, D] if there are none; turns: cosines and
    sines; places: [H_kv, D] of keys and of values.
    """
    cosines, sines = turns
    keys, values = places
    num_kv_heads, width = keys.shape
    for number in range(num_heads + num_kv_heads):
        head = joined[number * width : (number + 1) * width]
        if has_norms:
            is_key = number >= num_heads
            norm(head, norms[0, np.int64(is_key)], eps, head)
        turn(head, cosines, sines)
    for number in range(num_kv_heads):
        start = (num_heads + number) * width
        store(joined[start : start + width], keys[number])
        start += num_kv_heads * width
        store(joined[start : start + width], values[number])


@compiled_for_cpu(**FAST)
def gate(inner, gated, first, last):
    """Compute silu(gate) * up of columns whose blocks of gate and up [T, 2 M] alternate."""
    for row in range(len(gated)):
        for block in range(first, last):
            start = 2 * block * BLOCK
            gates = inner[row, start : start + BLOCK]
            ups = inner[row, start + BLOCK : start + 2 * BLOCK]
            result = gated[row, block * BLOCK : (block + 1) * BLOCK]
            for column in range(BLOCK):
                value = gates[column]
                result[column] = value / (np.float32(1) + exponential(-value)) * ups[column]
