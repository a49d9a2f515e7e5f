"""Attention of a few rows over the paged keys of their sequence, in Numba: tile by tile, with a running softmax.

Keys of a sequence are numbered like its tokens (`attention/inputs.py`). The queries of a part are its rows by the query
heads that share a K/V head. A tile of keys and values is laid out in blocks like those of a weight, so that scores and
results are products of all queries (`numba_product.py`). The result of a row does not depend on the other rows. Float32
arithmetic; K/V of float32, or the 16 bits of bfloat16.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels import compiled_for_cpu
from engine.kernels.numba_numbers import FAST, exponential, widened
from engine.models.numba_product import copy, product, transpose
from engine.models.numba_vectors import BLOCK, LANES

TILE = 64
"""Keys whose scores are computed together."""
_HIDDEN = np.float32(-1e30)
"""Score of a key that a query does not see."""


@compiled_for_cpu(**FAST)
def _lay_out_keys(keys, head, slots, offsets, count, blocks):
    """Write the keys [slots, H_kv, D] in these slots as columns of blocks [`TILE` / B, D, B].

    The rest of the last vector repeats the last key. slots: [`TILE`]; offsets: [`TILE`], working memory.
    """
    width, size = keys.shape[2], keys.itemsize
    for key in range(TILE):
        offsets[key] = slots[min(key, count - 1)] * keys.shape[1] * width * size
    source = np.int64(keys.ctypes.data) + head * width * size
    whole = width // LANES * LANES
    for first in range(0, count, LANES):
        block, column = first // BLOCK, first % BLOCK
        target = np.int64(blocks.ctypes.data) + (block * width * BLOCK + column) * 4
        for number in range(0, whole, LANES):
            transpose(
                keys,
                np.int64(offsets.ctypes.data) + first * 8,
                source + number * size,
                target + number * BLOCK * 4,
            )
        for number in range(whole, width):
            for key in range(first, min(first + LANES, count)):
                blocks[block, number, key % BLOCK] = widened(keys[slots[key], head, number])


@compiled_for_cpu(**FAST)
def _lay_out_values(values, head, slots, count, blocks):
    """Write the values [slots, H_kv, D] in these slots as rows of blocks [D / B, count, B]."""
    width, size = values.shape[2], values.itemsize
    whole = width // LANES * LANES
    for key in range(count):
        source = np.int64(values.ctypes.data) + (slots[key] * values.shape[1] + head) * width * size
        target = np.int64(blocks.ctypes.data) + key * BLOCK * 4
        for number in range(0, whole, LANES):
            block, column = number // BLOCK, number % BLOCK
            copy(values, source + number * size, target + (block * count * BLOCK + column) * 4)
        for number in range(whole, width):
            blocks[number // BLOCK, key, number % BLOCK] = widened(values[slots[key], head, number])


@compiled_for_cpu(**FAST)
def _mask(scores, start, count, words, limit, end, near, node_positions):
    """Hide the keys that a row does not see; return whether it sees any.

    start: number of the first key; limit: the row sees text below; end: keys from here on are nodes; near: keys at
    positions below are outside the window.
    """
    sees_any = False
    for key in range(count):
        number = start + key
        if number < end:
            is_seen = number < limit and number >= near
        else:
            node = number - end
            is_seen = (words[node >> 6] >> (node & 63)) & 1 == 1 and node_positions[node] >= near
        sees_any |= is_seen
        scores[key] = scores[key] if is_seen else _HIDDEN
    return sees_any


@intrinsic
def _largest(_context, source):
    """Return the largest of `TILE` float32 numbers at an address.

    The compiler compares the numbers of a loop one by one, because NaN has no order; here comparisons ignore it.
    """

    def build(_context, builder, _signature, operands):
        kind = ir.VectorType(ir.FloatType(), LANES)
        place = builder.inttoptr(operands[0], kind.as_pointer())
        vectors = [
            builder.load(builder.gep(place, [ir.Constant(ir.IntType(64), number)]), align=4)
            for number in range(TILE // LANES)
        ]

        def larger(one, other):
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        while len(vectors) > 1:
            vectors = [larger(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
        (found,) = vectors
        for distance in (1 << power for power in range(LANES.bit_length() - 1)):
            order = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane ^ distance for lane in range(LANES)])
            found = larger(found, builder.shuffle_vector(found, found, order))
        return builder.extract_element(found, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64), build


@compiled_for_cpu(**FAST)
def _soften(scores, count, state):
    """Turn a tile's scores into weights relative to the largest score so far; return the factor for earlier results.

    scores: [`TILE`], hidden from `count` on; state: largest score and sum of weights.
    """
    most = max(state[0], _largest(np.int64(scores.ctypes.data)))
    shrink = exponential(state[0] - most) if state[1] > 0 else np.float32(0)
    total = np.float32(0)
    for key in range(count):
        weight = exponential(scores[key] - most)
        # Scores that are NaN are not hidden, and make the result NaN.
        weight = weight if scores[key] != _HIDDEN else np.float32(0)
        scores[key] = weight
        total += weight
    state[0], state[1] = most, state[1] * shrink + total
    return shrink


@compiled_for_cpu(**FAST)
def _find_slots(pages, page_size, start, count, slots):
    """Write the slots of some keys of a text, from number `start` on."""
    page, place = start // page_size, start % page_size
    for key in range(count):
        slots[key] = pages[page] * page_size + place
        place += 1
        if place == page_size:
            page, place = page + 1, 0


@compiled_for_cpu(**FAST)
def _read_queries(joined, head, num_shared, first_row, scale, queries):
    """Write the scaled queries of the heads that share a K/V head, row by row."""
    width = queries.shape[1]
    for number in range(len(queries)):
        start = (head * num_shared + number % num_shared) * width
        for column in range(width):
            queries[number, column] = joined[first_row + number // num_shared, start + column] * scale


@compiled_for_cpu(**FAST)
def _sees_nodes(words):
    """Whether a row sees any node."""
    seen = np.int64(0)
    for number in range(len(words)):
        seen |= words[number]
    return seen != 0


@compiled_for_cpu(**FAST)
def attend(joined, keys, values, head, rows, scale, window, page_size, text, limits, positions, words, attended):
    """Write to `attended` [T, H * D] the attention of some rows of one sequence, for the query heads of one K/V head.

    joined: [T, at least H * D] queries; rows: the first one and the end; window: 0 is none; text: of the sequence, its
    pages, first key, key from which on keys are nodes, number of keys, and positions of nodes.
    """
    pages, first_key, end, num_keys, node_positions = text
    first_row, last_row = rows
    width = keys.shape[2]
    num_shared = attended.shape[1] // (keys.shape[1] * width)
    num_queries, num_blocks = (last_row - first_row) * num_shared, (width + BLOCK - 1) // BLOCK
    queries = np.empty((num_queries, width), np.float32)
    scores = np.empty((num_queries, TILE), np.float32)
    found = np.empty((num_queries, num_blocks * BLOCK), np.float32)
    results = np.zeros((num_queries, width), np.float32)
    states = np.zeros((num_queries, 2), np.float32)
    key_blocks = np.zeros((TILE // BLOCK, width, BLOCK), np.float32)
    value_blocks = np.zeros(num_blocks * TILE * BLOCK, np.float32)
    slots, offsets = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    no_scales, no_bias = np.empty((1, 0, BLOCK), np.float32), np.zeros(max(TILE, num_blocks * BLOCK), np.float32)
    _read_queries(joined, head, num_shared, first_row, scale, queries)
    states[:, 0] = _HIDDEN
    last_key = 0
    for row in range(first_row, last_row):
        last_key = max(last_key, num_keys if _sees_nodes(words[row]) else limits[row])
    for start in range(first_key, last_key, TILE):
        count = min(TILE, num_keys - start)
        stop = start + count
        _find_slots(pages, page_size, start, count, slots)
        _lay_out_keys(keys, head, slots, offsets, count, key_blocks)
        of_tile = value_blocks[: num_blocks * count * BLOCK].reshape(num_blocks, count, BLOCK)
        _lay_out_values(values, head, slots, count, of_tile)
        product(queries, key_blocks, no_scales, no_bias, scores, (0, (count + BLOCK - 1) // BLOCK), (0, 1))
        scores[:, count:] = _HIDDEN
        for query in range(num_queries):
            row, shrink = first_row + query // num_shared, np.float32(1)
            limit, near = limits[row], positions[row] - window + 1 if window > 0 else 0
            is_whole = stop <= limit and start >= near
            if is_whole or _mask(scores[query], start, count, words[row], limit, end, near, node_positions):
                shrink = _soften(scores[query], count, states[query])
            else:
                scores[query, :count] = np.float32(0)
            for column in range(width):
                results[query, column] *= shrink
        _add_values(scores, of_tile, no_scales, no_bias, found, results)
    for query in range(num_queries):
        share = np.float32(1) / states[query, 1]
        start = (head * num_shared + query % num_shared) * width
        for column in range(width):
            attended[first_row + query // num_shared, start + column] = results[query, column] * share


@compiled_for_cpu(**FAST)
def _add_values(weights, blocks, no_scales, no_bias, found, results):
    """Add to the results [Q, D] the products of weights [Q, `TILE`] with a tile of values."""
    product(weights, blocks, no_scales, no_bias, found, (0, len(blocks)), (0, 1))
    for query in range(len(results)):
        for column in range(results.shape[1]):
            results[query, column] += found[query, column]
