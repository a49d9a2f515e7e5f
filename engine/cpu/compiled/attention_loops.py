"""Attention of a few rows over paged keys, in Numba: tiles with a running softmax.

Keys of a sequence are numbered like its tokens (`attention/inputs.py`). The queries of a part
are its rows by query heads that share a K/V head. A tile of keys and values is laid out in
blocks as a weight is, so that scores and results are products of all queries
(`block_products.py`). The result of a row does not depend on the other rows, and that of a head not
on the other heads. Float32 arithmetic; K/V of float32, or the 16 bits of bfloat16. Values may be
narrower than keys: of latents (`attention/latent.py`), the keys' beginning.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a
# list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cpu.compiled.block_products import copy, product, transpose
from engine.cpu.compiled.floats import FAST, exponential, widened
from engine.cpu.compiled.simd_vectors import BLOCK, LANES
from engine.cpu.compiler import compiled_for_cpu

TILE = 64
"""Keys whose scores are computed together."""
_HIDDEN = np.float32(-1e30)
"""Score of a key that a query does not see."""


@compiled_for_cpu(**FAST)
def _lay_out_keys(keys, head, slots, offsets, count, blocks):
    """Write the keys [slots, H_kv, D] in these slots as columns of blocks [`TILE` / B, D, B].

    The rest of the last vector repeats the last key. slots: [`TILE`];
    offsets: [`TILE`], working memory.
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
def _lay_out_values(values, width, head, slots, count, blocks):
    """Write the beginnings of values in these slots as rows of blocks [width / B, count, B].

    values: [slots, H_kv, at least width].
    """
    size = values.itemsize
    whole = width // LANES * LANES
    for key in range(count):
        source = np.int64(values.ctypes.data) + (slots[key] * values.shape[1] + head) * values.shape[2] * size
        target = np.int64(blocks.ctypes.data) + key * BLOCK * 4
        for number in range(0, whole, LANES):
            block, column = number // BLOCK, number % BLOCK
            copy(values, source + number * size, target + (block * count * BLOCK + column) * 4)
        for number in range(whole, width):
            blocks[number // BLOCK, key, number % BLOCK] = widened(values[slots[key], head, number])


@compiled_for_cpu(**FAST)
def _mask(scores, start, limit, near):
    """Hide the keys of a tile of text that a row does not see.

    start: number of the first key; limit: the row sees keys with lower numbers; near: keys at lower
    positions are outside the window.
    """
    for key in range(TILE):
        number = start + key
        scores[key] = scores[key] if number < limit and number >= near else _HIDDEN


def _reduced(builder, address, join):
    """Reduce `TILE` float32 numbers at an address to one, pair by pair."""
    kind = ir.VectorType(ir.FloatType(), LANES)
    place = builder.inttoptr(address, kind.as_pointer())
    vectors = [
        builder.load(builder.gep(place, [ir.Constant(ir.IntType(64), number)]), align=4)
        for number in range(TILE // LANES)
    ]
    while len(vectors) > 1:
        vectors = [join(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    (reduced,) = vectors
    for distance in (1 << power for power in range(LANES.bit_length() - 1)):
        lanes = [lane ^ distance for lane in range(LANES)]
        order = ir.Constant(ir.VectorType(ir.IntType(32), LANES), lanes)
        reduced = join(reduced, builder.shuffle_vector(reduced, reduced, order))
    return builder.extract_element(reduced, ir.Constant(ir.IntType(32), 0))


@intrinsic
def _largest(_context, source):
    """Return the largest of `TILE` float32 numbers at an address.

    The compiler compares the numbers of a loop one by one, because NaN has no order;
    here comparisons ignore it.
    """

    def build(_context, builder, _signature, operands):
        def larger(first, second):
            return builder.select(builder.fcmp_ordered(">", first, second), first, second)

        return _reduced(builder, operands[0], larger)

    return types.float32(types.int64), build


@intrinsic
def _total(_context, source):
    """Return the sum of `TILE` float32 numbers at an address, in a fixed order."""

    def build(_context, builder, _signature, operands):
        return _reduced(builder, operands[0], builder.fadd)

    return types.float32(types.int64), build


@compiled_for_cpu(**FAST)
def _soften(scores, states, results):
    """Turn a tile's scores into weights, and scale earlier results.

    Weights are relative to the largest score so far. scores: [Q, `TILE`]; results: [Q, D];
    states: [Q, 4] largest score, sum of weights, and the largest score before with the factor of
    earlier results. Each loop is over all queries, because a query alone would wait for its
    largest score and for its factor.
    """
    num_queries = len(scores)
    for query in range(num_queries):
        states[query, 2] = states[query, 0]
        states[query, 0] = max(states[query, 0], _largest(np.int64(scores[query].ctypes.data)))
    for query in range(num_queries):
        shrink = exponential(states[query, 2] - states[query, 0])
        states[query, 3] = shrink if states[query, 1] > 0 else np.float32(0)
    for query in range(num_queries):
        most = states[query, 0]
        for key in range(TILE):
            weight = exponential(scores[query, key] - most)
            # Scores that are NaN are not hidden, and make the result NaN.
            scores[query, key] = weight if scores[query, key] != _HIDDEN else np.float32(0)
        states[query, 1] = states[query, 1] * states[query, 3] + _total(np.int64(scores[query].ctypes.data))
        for column in range(results.shape[1]):
            results[query, column] *= states[query, 3]


@compiled_for_cpu(**FAST)
def _find_slots(pages, page_size, start, count, slots):
    """Write the slots of `count` keys of a text, from number `start` on."""
    page, place = start // page_size, start % page_size
    for key in range(count):
        slots[key] = pages[page] * page_size + place
        place += 1
        if place == page_size:
            page += 1
            place = 0


@compiled_for_cpu(**FAST)
def _read_queries(joined, first_head, num_heads, first_row, scale, queries):
    """Write the scaled queries [Q, D] of query heads, row by row."""
    width = queries.shape[1]
    for query in range(len(queries)):
        row = first_row + query // num_heads
        start = (first_head + query % num_heads) * width
        for column in range(width):
            queries[query, column] = joined[row, start + column] * scale


@compiled_for_cpu(**FAST)
def _write_results(queries, first_head, num_heads, first_row, attended):
    """Write the queries' results, over their sums of weights, to their heads' columns."""
    width = queries.results.shape[1]
    for query in range(len(queries.results)):
        share = np.float32(1) / queries.states[query, 1]
        start = (first_head + query % num_heads) * width
        for column in range(width):
            attended[first_row + query // num_heads, start + column] = queries.results[query, column] * share


@compiled_for_cpu(**FAST)
def _gather(scores, start, num_text, first, bounds, visible_bits, node_positions, tile, places):
    """Copy a row's scores of a tile of the text that ends with it; return whether it sees any.

    scores: [N] of the keys from number `start` on, `num_text` of the text and then the nodes;
    first: the tile's first key after `start`; bounds: limit and near, as in `_mask`; tile: output,
    [`TILE`]; places: output, [`TILE`] index in `scores` of each of the tile's scores, or -1.
    """
    limit, near = bounds
    sees_any = False
    for key in range(TILE):
        number = start + first + key
        is_seen = first + key < num_text and number < limit and number >= near
        places[key] = first + key if is_seen else -1
        tile[key] = scores[first + key] if is_seen else _HIDDEN
        sees_any |= is_seen
    key = num_text - first
    for node in range(len(scores) - num_text):
        if (visible_bits[node >> 6] >> (node & 63)) & 1 == 0:
            continue
        if key >= 0 and key < TILE and node_positions[node] >= near:
            places[key] = num_text + node
            tile[key] = scores[num_text + node]
            sees_any = True
        key += 1
    return sees_any


@compiled_for_cpu(**FAST)
def _num_nodes_seen(visible_bits):
    """Return the number of nodes that a row sees."""
    count = 0
    for number in range(len(visible_bits)):
        word = visible_bits[number]
        while word != 0:
            word &= word - 1
            count += 1
    return count


class _Queries(NamedTuple):
    """Queries of a part, row by row and head by head, and their state while tiles are added."""

    numbers: Any  # [Q, D] scaled queries
    bounds: Any  # [Q, 2] limit and near, as in `_mask`
    states: Any  # [Q, 4], see `_soften`
    results: Any  # [Q, D_v] sums of weighted values


class _Memory(NamedTuple):
    """Working memory of a part."""

    slots: Any
    offsets: Any  # [`TILE`], for `_lay_out_keys`
    key_blocks: Any  # [tiles * `TILE` / B, D, B]
    value_blocks: Any  # [D_v / B * tiles * `TILE` * B]
    scores: Any  # [Q, tiles * `TILE`]
    products: Any  # [Q, whole blocks of D_v]
    no_scales: Any
    no_bias: Any


@compiled_for_cpu(**FAST)
def _add_values(weights, blocks, memory, results):
    """Add to the results [Q, D_v] the products of weights [Q, N] with N values."""
    products = memory.products
    product(weights, blocks, memory.no_scales, memory.no_bias, products, (0, len(blocks)), (0, 1))
    for query in range(len(results)):
        for column in range(results.shape[1]):
            results[query, column] += products[query, column]


@compiled_for_cpu(**FAST)
def _most_seen(rows, limits, visible_bits):
    """Return (end of the text that rows see, largest number of nodes that a row sees)."""
    last_key, most_nodes = 0, 0
    for row in range(rows[0], rows[1]):
        last_key = max(last_key, limits[row])
        most_nodes = max(most_nodes, _num_nodes_seen(visible_bits[row]))
    return last_key, most_nodes


@compiled_for_cpu(**FAST)
def _attend_to_whole_tiles(keys, values, head, pages, page_size, first_key, last_key, queries, memory):
    """Add whole tiles of known tokens, from `first_key` to `last_key`, to the queries' results."""
    num_queries, width = queries.results.shape
    num_blocks = (width + BLOCK - 1) // BLOCK
    tile_values = memory.value_blocks[: num_blocks * TILE * BLOCK].reshape(num_blocks, TILE, BLOCK)
    tile_scores = memory.scores.reshape(-1)[: num_queries * TILE].reshape(num_queries, TILE)
    for start in range(first_key, last_key, TILE):
        _find_slots(pages, page_size, start, TILE, memory.slots)
        _lay_out_keys(keys, head, memory.slots, memory.offsets, TILE, memory.key_blocks)
        _lay_out_values(values, width, head, memory.slots, TILE, tile_values)
        blocks = 0, TILE // BLOCK
        product(queries.numbers, memory.key_blocks, memory.no_scales, memory.no_bias, tile_scores, blocks, (0, 1))
        for query in range(num_queries):
            limit, near = queries.bounds[query, 0], queries.bounds[query, 1]
            if start + TILE > limit or start < near:
                _mask(tile_scores[query], start, limit, near)
        _soften(tile_scores, queries.states, queries.results)
        _add_values(tile_scores, tile_values, memory, queries.results)


@compiled_for_cpu(**FAST)
def _attend_to_rest(keys, values, head, rest, visible_bits, node_positions, queries, memory):
    """Add the rest of the text and the nodes to the queries' results, by tiles of seen keys.

    The slots of the rest are in `memory`. rest: number of its first key, number of its keys in
    the text, number of all its keys, first row, query heads of a row, the largest number of nodes
    that a row sees.
    """
    start, num_text, num_rest, first_row, num_heads, most_nodes = rest
    num_queries, width = queries.results.shape
    num_blocks = (width + BLOCK - 1) // BLOCK
    rest_values = memory.value_blocks[: num_blocks * num_rest * BLOCK].reshape(num_blocks, num_rest, BLOCK)
    tiles = np.empty((1, TILE), np.float32)
    tile = tiles[0]
    places = np.empty(TILE, np.int64)
    weights = np.empty((num_queries, num_rest), np.float32)
    for first in range(0, num_rest, TILE):
        blocks = memory.key_blocks[first // BLOCK : (first + TILE) // BLOCK]
        count = min(TILE, num_rest - first)
        _lay_out_keys(keys, head, memory.slots[first:], memory.offsets, count, blocks)
    blocks_of_rest = 0, (num_rest + BLOCK - 1) // BLOCK
    product(queries.numbers, memory.key_blocks, memory.no_scales, memory.no_bias, memory.scores, blocks_of_rest, (0, 1))
    _lay_out_values(values, width, head, memory.slots, num_rest, rest_values)
    for first in range(0, num_text + most_nodes, TILE):
        weights[:] = np.float32(0)
        for query in range(num_queries):
            scores = memory.scores[query, :num_rest]
            seen = visible_bits[first_row + query // num_heads]
            bounds = queries.bounds[query, 0], queries.bounds[query, 1]
            if not _gather(scores, start, num_text, first, bounds, seen, node_positions, tile, places):
                continue
            _soften(tiles, queries.states[query : query + 1], queries.results[query : query + 1])
            for key in range(TILE):
                if places[key] >= 0:
                    weights[query, places[key]] = tile[key]
        _add_values(weights, rest_values, memory, queries.results)


@compiled_for_cpu(**FAST)
def attend(
    joined, keys, values, heads, rows, scale, window, page_size, text, limits, positions, visible_bits, attended
):  # fmt: skip
    """Write to `attended` [T, H * D_v] the attention of rows, for query heads of one K/V head.

    joined: [T, at least H * D] queries; heads: the K/V head, the first query head, number of query
    heads, D_v; rows: first row and end; window: 0 is none; text: pages, first key, key from which
    on keys are nodes, number of keys, and positions of nodes of the sequence.

    A row sums over tiles of the text that ends with it: the known tokens, then the nodes that
    it sees. So a node's result has the bits that it would have as a token of the text,
    whatever else is drafted.
    """
    pages, first_key, end, num_keys, node_positions = text
    first_row, last_row = rows
    head, first_head, num_heads, value_width = heads
    width = keys.shape[2]
    last_key, most_nodes = _most_seen(rows, limits, visible_bits)
    # Whole tiles of known tokens are computed one by one, and the other keys of the rows together.
    rest_start = first_key + (end - first_key) // TILE * TILE
    num_text = end - rest_start
    num_rest = 0
    if most_nodes > 0:
        num_rest = num_keys - rest_start
    elif last_key > rest_start:
        num_rest = num_text

    num_queries = (last_row - first_row) * num_heads
    num_blocks = (value_width + BLOCK - 1) // BLOCK
    most_keys = max(1, (num_rest + TILE - 1) // TILE) * TILE
    queries = _Queries(
        numbers=np.empty((num_queries, width), np.float32),
        bounds=np.empty((num_queries, 2), np.int64),
        states=np.zeros((num_queries, 4), np.float32),
        results=np.zeros((num_queries, value_width), np.float32),
    )
    memory = _Memory(
        slots=np.empty(most_keys, np.int64),
        offsets=np.empty(TILE, np.int64),
        key_blocks=np.empty((most_keys // BLOCK, width, BLOCK), np.float32),
        value_blocks=np.empty(num_blocks * most_keys * BLOCK, np.float32),
        scores=np.empty((num_queries, most_keys), np.float32),
        products=np.empty((num_queries, num_blocks * BLOCK), np.float32),
        no_scales=np.empty((1, 0, BLOCK), np.float32),
        no_bias=np.zeros(max(most_keys, num_blocks * BLOCK), np.float32),
    )
    _read_queries(joined, first_head, num_heads, first_row, scale, queries.numbers)
    for query in range(num_queries):
        row = first_row + query // num_heads
        queries.states[query, 0] = _HIDDEN
        queries.bounds[query, 0] = limits[row]
        queries.bounds[query, 1] = positions[row] - window + 1 if window > 0 else 0
    last_whole = min(last_key, rest_start)
    if last_whole > first_key:
        _attend_to_whole_tiles(keys, values, head, pages, page_size, first_key, last_whole, queries, memory)
    if num_rest > 0:
        _find_slots(pages, page_size, rest_start, num_rest, memory.slots)
        rest = rest_start, num_text, num_rest, first_row, num_heads, most_nodes
        _attend_to_rest(keys, values, head, rest, visible_bits, node_positions, queries, memory)
    _write_results(queries, first_head, num_heads, first_row, attended)
