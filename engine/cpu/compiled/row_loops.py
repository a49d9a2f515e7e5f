"""Rows of the vocabulary in Numba: distributions, filters, and draws.

Torch writes a row for each of its operations, which takes microseconds. Here a distribution reads
its logits twice. A draw reads the sums of tiles, and then the tile that contains the token. The
plain operations are the oracle.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.cpu.compiled.floats import EXACT, FAST, exponential, from_order, order
from engine.cpu.compiler import compiled_for_cpu
from engine.kernels.protocol import Filters

TILE = 1024
_SMALL_TILE = 64
"""Tokens whose largest logit decides whether top-k looks at them."""
_DIGIT = 10
"""Bits of an order that `edge_of` decides in a pass.

A radix search over 31 bits, in passes of 11, 10 and 10 bits. Probabilities and logits that are not
positive have no further bits.
"""
_LEAST_ORDER = 0x7F800001
"""Distance of the order of minus infinity from 0."""
_MOST_ROUGH = 0.999
"""Least top-p without tokens left out in advance: rounding could exceed the margin."""
_LEAST_LOG = np.float32(-87)
"""Logit over temperature below the largest with probability 0: it is below 2e-38."""
# No reciprocals: that of a tiny temperature overflows.
_DIVIDED = FAST | {"fastmath": {"contract", "reassoc", "nsz"}}


@compiled_for_cpu(**_DIVIDED)
def distribution_of(logits, temperature, distribution):
    """Compute the distribution of one row; return the largest logit, or NaN if any is NaN."""
    width = len(logits)
    largest = np.int32(-0x80000000)
    for column in range(width):
        largest = max(largest, order(logits[column]))
    most = from_order(largest)
    total = 0.0
    for start in range(0, width, TILE):
        tile_total = np.float32(0)
        for column in range(start, min(start + TILE, width)):
            # The largest is subtracted first: at tiny temperatures the quotients alone would
            # overflow.
            log = (logits[column] - most) / temperature
            share = exponential(log)
            distribution[column] = np.float32(0) if log < _LEAST_LOG else share
        # In the loop above, the order of a sum would depend on where both arrays are in memory.
        for column in range(start, min(start + TILE, width)):
            tile_total += distribution[column]
        total += np.float64(tile_total)
    scale = np.float32(1 / total)
    for column in range(width):
        distribution[column] *= scale
    return np.float64(most) if total == total else math.nan


@compiled_for_cpu(**EXACT)
def likeliest(logits):
    """Return (the first of the most likely tokens, its logit, or NaN if any logit is NaN)."""
    largest = np.int32(-0x80000000)
    has_nan = False
    for column in range(len(logits)):
        largest = max(largest, order(logits[column]))
        has_nan |= logits[column] != logits[column]
    token = 0
    # Zero has two signs, so numbers are compared and not their order.
    most = from_order(largest)
    while token < len(logits) - 1 and logits[token] != most:
        token += 1
    return token, math.nan if has_nan else np.float64(most)


@compiled_for_cpu(**EXACT)
def edge_of(values, weights, needed, first_order):
    """Return the largest value such that all values from it on have at least the weight `needed`.

    It is the smallest value if all have less. Bits of it are computed some at a time, from the
    weight of each group of values with equal leading bits. first_order: added to the values'
    orders, so that none is negative.
    """
    sums = np.empty(2 << _DIGIT)
    edge, reached = np.int64(0), 0.0
    for shift in (2 * _DIGIT, _DIGIT, 0):
        sums[:] = 0
        for number in range(len(values)):
            place = (np.int64(order(values[number])) + first_order) >> shift
            if shift == 2 * _DIGIT or place >> _DIGIT == edge:
                sums[place - (edge << _DIGIT)] += np.float64(weights[number])
        chosen, through = 0, reached
        for digit in range((2 << _DIGIT) - 1, -1, -1):
            if sums[digit] > 0:
                chosen, reached = digit, through
                through += sums[digit]
                if through >= needed:
                    break
        edge = (edge << _DIGIT) + chosen
    return from_order(np.int32(edge - first_order))


@compiled_for_cpu(**EXACT)
def keep_nucleus(distribution, top_p):
    """Keep a row's smallest set with mass >= top_p, with ties, and normalise it."""
    # Tokens below share less than half of what may be left out; rounding of the others stays within
    # the other half.
    least = np.float32(0.5 * (1 - top_p) / len(distribution)) if top_p < _MOST_ROUGH else np.float32(0)
    likely = np.empty(len(distribution) + 1, np.float32)
    count = 0
    for column in range(len(distribution)):
        likely[count] = distribution[column]
        count += distribution[column] >= least
    lowest = edge_of(likely[:count], likely[:count], top_p, 0)
    total = 0.0
    for column in range(len(distribution)):
        distribution[column] = distribution[column] if distribution[column] >= lowest else np.float32(0)
        total += np.float64(distribution[column])
    scale = np.float32(1 / total)
    for column in range(len(distribution)):
        distribution[column] *= scale


@compiled_for_cpu(**EXACT)
def _largest_of_tiles(logits, peaks):
    """Write the largest logit of each small tile; return (largest of all, any NaN)."""
    most, has_nan = np.int32(-0x80000000), False
    for tile in range(len(peaks)):
        largest = np.int32(-0x80000000)
        for column in range(tile * _SMALL_TILE, min((tile + 1) * _SMALL_TILE, len(logits))):
            largest = max(largest, order(logits[column]))
            has_nan |= logits[column] != logits[column]
        peaks[tile] = from_order(largest)
        most = max(most, largest)
    return from_order(most), has_nan


@compiled_for_cpu(**EXACT)
def _likely_distribution(logits, temperature, least_log, top_k, top_p, distribution):
    """Compute the distribution of a row with min-p or top-k; skip most tokens if top-k is small.

    Logits over temperature, with maximum 0, decide what is kept, as in the plain operations.
    """
    peaks = np.empty((len(logits) + _SMALL_TILE - 1) // _SMALL_TILE, np.float32)
    most, has_nan = _largest_of_tiles(logits, peaks)
    if has_nan or not abs(most) < math.inf:
        distribution[:] = np.float32(math.nan)
        return math.nan
    for tile in range(len(peaks)):
        peaks[tile] = (peaks[tile] - most) / temperature
    edge = least_log
    if top_k <= len(peaks):
        # The largest logits of top_k tiles reach this edge, so at least top_k tokens do: the final
        # edge is not lower.
        edge = max(edge, edge_of(peaks, np.ones(len(peaks)), top_k, _LEAST_ORDER))
    likely = np.empty(len(logits) + 1, np.float32)
    places = np.empty(len(logits) + 1, np.int64)
    count = 0
    for tile in range(len(peaks)):
        if peaks[tile] >= edge:
            for column in range(tile * _SMALL_TILE, min((tile + 1) * _SMALL_TILE, len(logits))):
                scaled = (logits[column] - most) / temperature
                likely[count], places[count] = scaled, column
                count += scaled >= edge
    edge = edge_of(likely[:count], np.ones(count), top_k, _LEAST_ORDER)
    kept, total = 0, 0.0
    for number in range(count):
        scaled = likely[number]
        if scaled < edge:
            continue
        share = exponential(scaled) if scaled >= _LEAST_LOG else np.float32(0)
        likely[kept], places[kept] = share, places[number]
        kept += 1
        total += np.float64(share)
    scale = np.float32(1 / total)
    for number in range(kept):
        likely[number] *= scale
    if top_p < 1:
        keep_nucleus(likely[:kept], top_p)
    distribution[:] = np.float32(0)
    for number in range(kept):
        distribution[places[number]] = likely[number]
    return np.float64(most)


@compiled_for_cpu(**EXACT)
def filtered_distribution(logits, temperature, least_log, top_k, top_p, distribution):
    """Compute a row's filtered distribution; return the largest logit, or NaN.

    least_log: logarithm of min_p.
    """
    if least_log > -math.inf or 0 < top_k < len(logits):
        num_kept = top_k if top_k > 0 else len(logits)
        return _likely_distribution(logits, temperature, least_log, num_kept, top_p, distribution)
    most = distribution_of(logits, temperature, distribution)
    if top_p < 1:
        keep_nucleus(distribution, top_p)
    return most


@compiled_for_cpu(**EXACT)
def distributions(logits, temperatures, least_logs, top_ks, top_ps, distributions):
    """Compute the distributions of all rows after their filters."""
    for row in range(len(logits)):
        filtered_distribution(
            logits[row], temperatures[row], least_logs[row], top_ks[row], top_ps[row], distributions[row]
        )


@compiled_for_cpu(**FAST)
def mass_of(target, draft, weight, uses_surplus, column):
    """Return the target's probability of a token, or its surplus (weight * target - draft)+."""
    mass = target[column]
    if uses_surplus:
        mass = weight * mass - draft[column]
        mass = np.float32(0) if mass < np.float32(0) else mass
    return mass


@compiled_for_cpu(**FAST)
def sum_of(target, draft, weight, uses_surplus, start, stop):
    """Return the sum of the masses of these tokens, in float64."""
    total = 0.0
    for column in range(start, stop):
        total += np.float64(mass_of(target, draft, weight, uses_surplus, column))
    return total


@compiled_for_cpu(**FAST)
def draw_from(target, draft, weight, uses_surplus, uniform):
    """Draw from the surplus, if `uses_surplus` and there is any, else from the target.

    The first token whose cumulative mass exceeds `uniform` times the sum is
    drawn, as in `draw.categorical`.
    """
    width = len(target)
    num_tiles = (width + TILE - 1) // TILE
    sums = np.empty(num_tiles)
    while True:
        total = 0.0
        for tile in range(num_tiles):
            start = tile * TILE
            sums[tile] = sum_of(target, draft, weight, uses_surplus, start, min(start + TILE, width))
            total += sums[tile]
        if total > 0 or not uses_surplus:
            break
        uses_surplus = False
    bound = uniform * total
    before, chosen, so_far = 0.0, 0, 0.0
    for tile in range(num_tiles):
        if sums[tile] > 0:
            # Rounding may put the bound after the last tile, or token, that has mass.
            chosen, before = tile, so_far
            so_far += sums[tile]
            if so_far > bound:
                break
    token = chosen * TILE
    for column in range(token, min(token + TILE, width)):
        mass = np.float64(mass_of(target, draft, weight, uses_surplus, column))
        if mass > 0:
            token = column
            before += mass
            if before > bound:
                break
    return token


@compiled_for_cpu(**EXACT)
def draw(distribution, rows, uniforms, tokens):
    """Draw a token from each of these rows."""
    for number in range(len(rows)):
        row = distribution[rows[number]]
        tokens[number] = draw_from(row, row, np.float32(1), False, uniforms[number])


def arrays_of(filters: Filters, num_rows: int) -> tuple[npt.NDArray[Any], ...]:
    """Return ([N] logarithms of min_p, top_k, top_p), which keep all without a filter."""
    min_p_N, top_k_N, top_p_N = filters[:3]
    least_log_N = None if min_p_N is None else min_p_N.log()
    return (
        _array_of(least_log_N, num_rows, -np.inf, np.float32),
        _array_of(top_k_N, num_rows, 0, np.int64),
        _array_of(top_p_N, num_rows, 1, np.float32),
    )


def _array_of(value_N: Tensor | None, num_rows: int, default: float, dtype: Any) -> npt.NDArray[Any]:
    if value_N is None:
        return np.full(num_rows, default, dtype)
    array: npt.NDArray[Any] = value_N.contiguous().numpy()
    return array
