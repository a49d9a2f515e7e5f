"""One pass of a decoder of the Llama kind in one Numba function: from tokens to logits, on any number of cores.

The caller and its helpers (`numba_work.py`) run `_work` over one table of arrays, in phases: the rows of a norm, blocks
of columns of a product, K/V heads of a sequence in attention. Weights have the checkpoint's type, all else is float32,
K/V are float32 or bfloat16. `cpu_decoder.py` owns the arrays and calls `run`.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, types

from engine.execution.numba_attention import TILE, attend
from engine.execution.numba_product import BLOCK, GROUP, product
from engine.execution.numba_work import claim, finish, pointer_to, together
from engine.kernels import compiled_for_cpu
from engine.numba_numbers import FAST, exponential, rounded, widened

_ROWS = 8
"""Rows of a part of those phases that go row by row."""
_PARTS = 2
"""Parts of a product for each core."""
_LAYER_PHASES = 8
_OTHER_PHASES = 4

# Rows of the table of a pass. Products of a model with L layers: a weight [L, N / B, K, B], behind it its scales
# [L, N / B, groups, B] and its bias [L, N]; those of the embedding and the head without L.
EMBEDDING, QKV, OUTPUT, GATE_UP, DOWN, HEAD = range(0, 18, 3)
# Norms [2 L + 1, D]; those of queries and keys [L, 2, head], or [0, 2, head]; radians [head / 2] by which a position
# rotates; epsilon, scale of scores, factor of cosines and sines; windows [L] in positions, 0 for none.
NORMS, HEAD_NORMS, FREQUENCIES, CONSTANTS, WINDOWS = range(18, 23)
# K/V [L, slots, H_kv, head].
KEYS, VALUES = 23, 24
# Arrays to work in, of T rows (see `_work`), and [phases, `ROW`] counters.
HIDDEN, ROTATION, NORMED, JOINED, STATES, ATTENDED, SUMMAND, INNER, GATED, CHOSEN, COUNTERS = range(25, 36)
# Of a pass over T tokens of R sequences: see `paged.PagedInput`. Parts [P, 3]: sequence, first row and end of rows that
# attend together; sizes: tokens of a page, cores.
TOKENS, SLOTS, WANTED, PARTS, WORDS, PAGES, FIRST_KEYS, ENDS, NUM_KEYS = range(36, 45)
NODE_POSITIONS, LIMITS, POSITIONS, LOGITS, SIZES = range(45, 50)
NUM_FIELDS = 50
COLUMNS = 5
"""Of a table: the address of an array, and up to four sizes."""


@compiled_for_cpu(inline="always")
def _array1(table, field, dtype):
    return carray(pointer_to(table[field, 0]), (table[field, 1],), dtype)


@compiled_for_cpu(inline="always")
def _array2(table, field, dtype):
    return carray(pointer_to(table[field, 0]), (table[field, 1], table[field, 2]), dtype)


@compiled_for_cpu(inline="always")
def _array3(table, field, dtype):
    return carray(pointer_to(table[field, 0]), (table[field, 1], table[field, 2], table[field, 3]), dtype)


@compiled_for_cpu(inline="always")
def _array4(table, field, dtype):
    sizes = table[field, 1], table[field, 2], table[field, 3], table[field, 4]
    return carray(pointer_to(table[field, 0]), sizes, dtype)


@compiled_for_cpu(**FAST)
def _embed(token, weights, scales, row):
    """The embedding [D] of a token, out of blocks like those of a product."""
    block, column = token // BLOCK, token % BLOCK
    for number in range(len(row)):
        row[number] = widened(weights[block, number, column])
    if scales.shape[1] > 0:
        for number in range(len(row)):
            row[number] *= scales[block, number // GROUP, column]


@compiled_for_cpu(**FAST)
def _norm(row, weight, eps, normed):
    """The RMS norm of a row, which may be written over it."""
    width = len(row)
    squares = np.float32(0)
    for column in range(width):
        squares += row[column] * row[column]
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
    for column in range(width):
        normed[column] = row[column] * scale * weight[column]


@compiled_for_cpu(**FAST)
def _turn(head, cosines, sines):
    """Rotate a head [D] by halves: each number meets the one at its place in the other half."""
    half = len(head) // 2
    for column in range(half):
        first, second = head[column], head[half + column]
        head[column] = first * cosines[column] - second * sines[column]
        head[half + column] = second * cosines[column] + first * sines[column]


@compiled_for_cpu(**FAST)
def _store(numbers, place):
    for column in range(len(numbers)):
        place[column] = rounded(numbers[column], place[column])


@compiled_for_cpu(**FAST)
def _turn_and_store(joined, num_heads, norms, has_norms, eps, cosines, sines, keys, values):
    """Norm and rotate the queries and keys of a row of q, k and v, and store its keys and values [H_kv, D]."""
    num_kv_heads, width = keys.shape
    for number in range(num_heads + num_kv_heads):
        head = joined[number * width : (number + 1) * width]
        if has_norms:
            _norm(head, norms[0 if number < num_heads else 1], eps, head)
        _turn(head, cosines, sines)
    for number in range(num_kv_heads):
        start = (num_heads + number) * width
        _store(joined[start : start + width], keys[number])
        start += num_kv_heads * width
        _store(joined[start : start + width], values[number])


@compiled_for_cpu(**FAST)
def _gate(inner, gated, first, last):
    """silu(gate) * up of columns whose blocks of gate and up [T, 2 M] take turns."""
    for row in range(len(gated)):
        for block in range(first, last):
            start = 2 * block * BLOCK
            gates, ups = inner[row, start : start + BLOCK], inner[row, start + BLOCK : start + 2 * BLOCK]
            result = gated[row, block * BLOCK : (block + 1) * BLOCK]
            for column in range(BLOCK):
                value = gates[column]
                result[column] = value / (np.float32(1) + exponential(-value)) * ups[column]


@compiled_for_cpu()
def _multiply(counters, phase, cores, rows, weights, scales, bias, result):
    """Write a product, in parts of whole blocks."""
    num_blocks = len(weights)
    num_parts = min(num_blocks, 1 if cores == 1 else _PARTS * cores)
    count, part = 0, claim(counters, phase, num_parts)
    while part >= 0:
        first, last = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
        product(rows, weights, scales, bias, result, first, last)
        count, part = count + 1, claim(counters, phase, num_parts)
    finish(counters, phase, count, num_parts)


@compiled_for_cpu(**FAST)
def _multiply_gated(counters, phase, cores, rows, weights, scales, bias, inner, gated):
    """Write the gated product of a layer's MLP, in parts of whole blocks of gate and up."""
    num_blocks = len(weights) // 2
    num_parts = min(num_blocks, 1 if cores == 1 else _PARTS * cores)
    count, part = 0, claim(counters, phase, num_parts)
    while part >= 0:
        first, last = part * num_blocks // num_parts, (part + 1) * num_blocks // num_parts
        product(rows, weights, scales, bias, inner, 2 * first, 2 * last)
        _gate(inner, gated, first, last)
        count, part = count + 1, claim(counters, phase, num_parts)
    finish(counters, phase, count, num_parts)


@compiled_for_cpu(**FAST)
def _begin(counters, phase, tokens, positions, embedding, scales, frequencies, factor, hidden, rotation):
    """Write the embeddings of the tokens, and cosines and sines of their rotation."""
    num_parts = (len(hidden) + _ROWS - 1) // _ROWS
    count, part = 0, claim(counters, phase, num_parts)
    while part >= 0:
        for row in range(part * _ROWS, min(len(hidden), (part + 1) * _ROWS)):
            _embed(tokens[row], embedding, scales, hidden[row])
            for number in range(len(frequencies)):
                angle = np.float32(positions[row]) * frequencies[number]
                rotation[0, row, number], rotation[1, row, number] = np.cos(angle) * factor, np.sin(angle) * factor
        count, part = count + 1, claim(counters, phase, num_parts)
    finish(counters, phase, count, num_parts)


@compiled_for_cpu(**FAST)
def _add_and_norm(counters, phase, hidden, summand, has_summand, weight, eps, normed):
    """Add the rows of a product to the hidden states if there is one, and norm them."""
    num_parts = (len(hidden) + _ROWS - 1) // _ROWS
    count, part = 0, claim(counters, phase, num_parts)
    while part >= 0:
        for row in range(part * _ROWS, min(len(hidden), (part + 1) * _ROWS)):
            if has_summand:
                for column in range(hidden.shape[1]):
                    hidden[row, column] += summand[row, column]
            _norm(hidden[row], weight, eps, normed[row])
        count, part = count + 1, claim(counters, phase, num_parts)
    finish(counters, phase, count, num_parts)


@compiled_for_cpu(**FAST)
def _rotate(counters, phase, joined, num_heads, norms, has_norms, eps, rotation, slots, keys, values):
    """Rotate the queries and keys of all rows, and write keys and values to their slots."""
    num_parts = (len(joined) + _ROWS - 1) // _ROWS
    count, part = 0, claim(counters, phase, num_parts)
    while part >= 0:
        for row in range(part * _ROWS, min(len(joined), (part + 1) * _ROWS)):
            slot = slots[row]
            cosines, sines = rotation[0, row], rotation[1, row]
            _turn_and_store(
                joined[row], num_heads, norms, has_norms, eps, cosines, sines, keys[slot], values[slot]
            )
        count, part = count + 1, claim(counters, phase, num_parts)
    finish(counters, phase, count, num_parts)


@compiled_for_cpu(**FAST)
def _attend(counters, phase, table, queries, keys, values, scale, window, states, attended):
    """Write the attention of all rows, in parts of some rows of a sequence and one K/V head."""
    parts, pages = _array2(table, PARTS, np.int64), _array2(table, PAGES, np.int32)
    first_keys, ends = _array1(table, FIRST_KEYS, np.int32), _array1(table, ENDS, np.int32)
    num_keys, limits = _array1(table, NUM_KEYS, np.int32), _array1(table, LIMITS, np.int32)
    positions, words = _array1(table, POSITIONS, np.int32), _array2(table, WORDS, np.int64)
    node_positions = _array2(table, NODE_POSITIONS, np.int32)
    page_size = _array1(table, SIZES, np.int64)[0]
    slots, scores = np.empty(TILE, np.int64), np.empty(TILE, np.float32)
    num_parts = len(parts) * keys.shape[1]
    count, part = 0, claim(counters, phase, num_parts)
    while part >= 0:
        sequence, first_row, last_row = parts[part // keys.shape[1]]
        attend(
            queries,
            keys,
            values,
            part % keys.shape[1],
            first_row,
            last_row,
            scale,
            window,
            page_size,
            pages[sequence],
            first_keys[sequence],
            ends[sequence],
            num_keys[sequence],
            limits,
            positions,
            words,
            node_positions[sequence],
            states,
            slots,
            scores,
            attended,
        )
        count, part = count + 1, claim(counters, phase, num_parts)
    finish(counters, phase, count, num_parts)


@compiled_for_cpu(**FAST)
def _choose(counters, phase, normed, wanted, chosen):
    """Copy the rows that are wanted."""
    count, part = 0, claim(counters, phase, 1)
    while part >= 0:
        for number in range(len(wanted)):
            chosen[number] = normed[wanted[number]]
        count, part = count + 1, claim(counters, phase, 1)
    finish(counters, phase, count, 1)


@compiled_for_cpu(**FAST)
def _layer(counters, phase, table, layer, weight_type, kv_type):
    """Run one layer; `phase` is its first."""
    constants, norms = _array1(table, CONSTANTS, np.float32), _array2(table, NORMS, np.float32)
    head_norms, windows = _array3(table, HEAD_NORMS, np.float32), _array1(table, WINDOWS, np.int64)
    hidden, normed = _array2(table, HIDDEN, np.float32), _array2(table, NORMED, np.float32)
    joined, attended = _array2(table, JOINED, np.float32), _array2(table, ATTENDED, np.float32)
    summand, rotation = _array2(table, SUMMAND, np.float32), _array3(table, ROTATION, np.float32)
    keys, values = _array4(table, KEYS, kv_type)[layer], _array4(table, VALUES, kv_type)[layer]
    cores, eps, has_norms = _array1(table, SIZES, np.int64)[1], constants[0], len(head_norms) > 0
    num_heads = attended.shape[1] // keys.shape[2]

    _add_and_norm(counters, phase, hidden, summand, layer > 0, norms[2 * layer], eps, normed)
    _layer_product(counters, phase + 1, cores, table, QKV, layer, weight_type, normed, joined)
    of_head = head_norms[layer if has_norms else 0]
    slots = _array1(table, SLOTS, np.int64)
    _rotate(counters, phase + 2, joined, num_heads, of_head, has_norms, eps, rotation, slots, keys, values)
    states = _array3(table, STATES, np.float32)
    _attend(counters, phase + 3, table, joined, keys, values, constants[1], windows[layer], states, attended)
    _layer_product(counters, phase + 4, cores, table, OUTPUT, layer, weight_type, attended, summand)
    _add_and_norm(counters, phase + 5, hidden, summand, True, norms[2 * layer + 1], eps, normed)
    inner, gated = _array2(table, INNER, np.float32), _array2(table, GATED, np.float32)
    weights, scales = _array4(table, GATE_UP, weight_type)[layer], _array4(table, GATE_UP + 1, np.float32)[layer]
    bias = _array2(table, GATE_UP + 2, np.float32)[layer]
    _multiply_gated(counters, phase + 6, cores, normed, weights, scales, bias, inner, gated)
    _layer_product(counters, phase + 7, cores, table, DOWN, layer, weight_type, gated, summand)


@compiled_for_cpu()
def _layer_product(counters, phase, cores, table, field, layer, weight_type, rows, result):
    weights, scales = _array4(table, field, weight_type)[layer], _array4(table, field + 1, np.float32)[layer]
    bias = _array2(table, field + 2, np.float32)[layer]
    _multiply(counters, phase, cores, rows, weights, scales, bias, result)


@compiled_for_cpu(**FAST)
def _work(address, weight_type, kv_type):
    """Take part in all phases of the pass whose table is at an address."""
    table = carray(pointer_to(address), (NUM_FIELDS, COLUMNS), np.int64)
    counters = _array2(table, COUNTERS, np.int64)
    constants, norms = _array1(table, CONSTANTS, np.float32), _array2(table, NORMS, np.float32)
    hidden, normed = _array2(table, HIDDEN, np.float32), _array2(table, NORMED, np.float32)
    summand, chosen = _array2(table, SUMMAND, np.float32), _array2(table, CHOSEN, np.float32)
    tokens, positions = _array1(table, TOKENS, np.int64), _array1(table, POSITIONS, np.int32)
    cores, num_layers = _array1(table, SIZES, np.int64)[1], table[QKV, 1]

    embedding, scales = _array3(table, EMBEDDING, weight_type), _array3(table, EMBEDDING + 1, np.float32)
    frequencies, rotation = _array1(table, FREQUENCIES, np.float32), _array3(table, ROTATION, np.float32)
    _begin(counters, 0, tokens, positions, embedding, scales, frequencies, constants[2], hidden, rotation)
    for layer in range(num_layers):
        _layer(counters, 1 + layer * _LAYER_PHASES, table, layer, weight_type, kv_type)
    phase = 1 + num_layers * _LAYER_PHASES
    _add_and_norm(counters, phase, hidden, summand, True, norms[2 * num_layers], constants[0], normed)
    _choose(counters, phase + 1, normed, _array1(table, WANTED, np.int64), chosen)
    head, scales = _array3(table, HEAD, weight_type), _array3(table, HEAD + 1, np.float32)
    bias, logits = _array1(table, HEAD + 2, np.float32), _array2(table, LOGITS, np.float32)
    _multiply(counters, phase + 2, cores, chosen, head, scales, bias, logits)


def num_phases(num_layers: int) -> int:
    """Phases of a pass."""
    return num_layers * _LAYER_PHASES + _OTHER_PHASES


@cache
def work_for(weight_type: Any, kv_type: Any) -> Any:
    """The C function of a pass with weights and K/V of these types of numpy; it takes the address of a table."""

    def work(address):
        _work(address, weight_type, kv_type)

    kind = types.void(types.int64)
    try:
        return cfunc(kind, cache=True)(work)
    except RuntimeError:  # neither the code's folder nor the user's can be written to
        return cfunc(kind)(work)


@compiled_for_cpu(inline="always")
def _put1(table, field, array):
    table[field, 0], table[field, 1] = np.int64(array.ctypes.data), array.shape[0]


@compiled_for_cpu(inline="always")
def _put2(table, field, array):
    table[field, 0], table[field, 1], table[field, 2] = np.int64(array.ctypes.data), array.shape[0], array.shape[1]


@compiled_for_cpu(nogil=True)
def run(
    shared,
    function,
    table,
    tokens,
    slots,
    wanted,
    parts,
    words,
    pages,
    first_keys,
    ends,
    num_keys,
    node_positions,
    limits,
    positions,
    logits,
):
    """Run a pass: write its arrays into the table and call `function`, the address of a `work_for`, with all cores."""
    _put1(table, TOKENS, tokens)
    _put1(table, SLOTS, slots)
    _put1(table, WANTED, wanted)
    _put2(table, PARTS, parts)
    _put2(table, WORDS, words)
    _put2(table, PAGES, pages)
    _put1(table, FIRST_KEYS, first_keys)
    _put1(table, ENDS, ends)
    _put1(table, NUM_KEYS, num_keys)
    _put2(table, NODE_POSITIONS, node_positions)
    _put1(table, LIMITS, limits)
    _put1(table, POSITIONS, positions)
    _put2(table, LOGITS, logits)
    for field in (HIDDEN, NORMED, JOINED, STATES, ATTENDED, SUMMAND, INNER, GATED):
        table[field, 1] = len(tokens)
    table[ROTATION, 2], table[CHOSEN, 1] = len(tokens), len(wanted)
    _array2(table, COUNTERS, np.int64)[:] = 0
    cores = _array1(table, SIZES, np.int64)[1]
    together(shared, function, np.int64(table.ctypes.data), cores - 1)
