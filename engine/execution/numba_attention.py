"""Attention of a few rows over the paged keys of their sequence, in Numba: tile by tile, with a running softmax.

Keys of a sequence are numbered like its tokens (`paged.py`). A tile of keys is read once for all rows of a part and
for the query heads that share a K/V head. What a row gives does not depend on the other rows. Float32 arithmetic; K/V
of float32, or the 16 bits of bfloat16.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import numpy as np

from engine.kernels import compiled_for_cpu
from engine.numba_numbers import FAST, exponential, widened

TILE = 64
"""Keys whose scores are computed together."""
_HIDDEN = np.float32(-1e30)
"""Score of a key that a query does not see."""


@compiled_for_cpu(**FAST)
def _score(query, keys, head, slots, count, scale, scores):
    """Scores of a query [D] and the keys [slots, H_kv, D] in these slots."""
    width = len(query)
    key = 0
    while key + 4 <= count:
        first, second = keys[slots[key], head], keys[slots[key + 1], head]
        third, fourth = keys[slots[key + 2], head], keys[slots[key + 3], head]
        one, two, three, four = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for number in range(width):
            of_query = query[number]
            one += of_query * widened(first[number])
            two += of_query * widened(second[number])
            three += of_query * widened(third[number])
            four += of_query * widened(fourth[number])
        scores[key], scores[key + 1] = one * scale, two * scale
        scores[key + 2], scores[key + 3] = three * scale, four * scale
        key += 4
    while key < count:
        last = keys[slots[key], head]
        total = np.float32(0)
        for number in range(width):
            total += query[number] * widened(last[number])
        scores[key] = total * scale
        key += 1


@compiled_for_cpu(**FAST)
def _add_values(weights, values, head, slots, count, result):
    """Add the values [slots, H_kv, D] in these slots, times their weights, to a result [D]."""
    width = len(result)
    key = 0
    while key + 4 <= count:
        first, second = values[slots[key], head], values[slots[key + 1], head]
        third, fourth = values[slots[key + 2], head], values[slots[key + 3], head]
        one, two, three, four = weights[key], weights[key + 1], weights[key + 2], weights[key + 3]
        for number in range(width):
            result[number] += (one * widened(first[number]) + two * widened(second[number])) + (
                three * widened(third[number]) + four * widened(fourth[number])
            )
        key += 4
    while key < count:
        last, weight = values[slots[key], head], weights[key]
        for number in range(width):
            result[number] += weight * widened(last[number])
        key += 1


@compiled_for_cpu(**FAST)
def _mask(scores, start, count, row, limit, end, near, words, node_positions):
    """Hide the keys that a row does not see; the number of those that it sees.

    start: number of the first key; limit: the row sees text below; end: keys from here on are nodes; near: keys at
    positions below are outside the window.
    """
    num_seen = 0
    for key in range(count):
        number = start + key
        if number < end:
            is_seen = number < limit and number >= near
        else:
            node = number - end
            is_seen = (words[row, node >> 6] >> (node & 63)) & 1 == 1 and node_positions[node] >= near
        if is_seen:
            num_seen += 1
        else:
            scores[key] = _HIDDEN
    return num_seen


@compiled_for_cpu(**FAST)
def _soften(scores, count, num_seen, largest, total, result):
    """Turn a tile's scores into weights beside the largest score so far; (the new largest, the new total).

    result: what earlier tiles gave, which is scaled to the new largest.
    """
    most = largest
    for key in range(count):
        most = max(most, scores[key])
    if most > largest:
        shrink = exponential(largest - most) if largest > _HIDDEN else np.float32(0)
        total *= shrink
        for number in range(len(result)):
            result[number] *= shrink
    of_tile = np.float32(0)
    for key in range(count):
        weight = exponential(scores[key] - most)
        if num_seen < count:
            weight = weight if scores[key] > _HIDDEN else np.float32(0)
        scores[key] = weight
        of_tile += weight
    return most, total + of_tile


@compiled_for_cpu(**FAST)
def attend(
    queries,
    keys,
    values,
    head,
    first_row,
    last_row,
    scale,
    window,
    page_size,
    pages,
    first_key,
    end,
    num_keys,
    limits,
    positions,
    words,
    node_positions,
    states,
    slots,
    scores,
    attended,
):
    """Write to `attended` [T, H * D] what some rows of one sequence see by the query heads of one K/V head.

    queries: [T, at least H * D]; window: 0 is none; states: [T, H, 2] and slots, scores: [`TILE`], to work in.
    """
    width = keys.shape[2]
    num_shared = attended.shape[1] // (keys.shape[1] * width)
    most_limit = 0
    for row in range(first_row, last_row):
        most_limit = max(most_limit, limits[row])
        for number in range(head * num_shared, (head + 1) * num_shared):
            states[row, number, 0], states[row, number, 1] = _HIDDEN, np.float32(0)
            attended[row, number * width : (number + 1) * width] = np.float32(0)
    for start in range(first_key, num_keys, TILE):
        count = min(TILE, num_keys - start)
        stop = start + count
        if start >= most_limit and stop <= end:
            continue
        page, place = start // page_size, start % page_size
        for key in range(count):
            slots[key] = pages[page] * page_size + place
            place += 1
            if place == page_size:
                page, place = page + 1, 0
        for row in range(first_row, last_row):
            limit = limits[row]
            near = positions[row] - window + 1 if window > 0 else 0
            if stop <= end and (start >= limit or stop <= near):
                continue
            is_seen = stop <= limit and start >= near
            for number in range(head * num_shared, (head + 1) * num_shared):
                place = slice(number * width, (number + 1) * width)
                _score(queries[row, place], keys, head, slots, count, scale, scores)
                num_seen = count
                if not is_seen:
                    num_seen = _mask(scores, start, count, row, limit, end, near, words, node_positions)
                    if num_seen == 0:
                        continue
                result = attended[row, place]
                state = states[row, number]
                state[0], state[1] = _soften(scores, count, num_seen, state[0], state[1], result)
                _add_values(scores, values, head, slots, count, result)
    for row in range(first_row, last_row):
        for number in range(head * num_shared, (head + 1) * num_shared):
            share = np.float32(1) / states[row, number, 1]
            for column in range(number * width, (number + 1) * width):
                attended[row, column] *= share
