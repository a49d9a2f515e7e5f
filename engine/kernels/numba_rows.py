"""Rows of the vocabulary in Numba, on a CPU: laws, and draws from a law or from the surplus of one law over another.

Torch writes a row for every step of its operations, which takes some microseconds each. Here a law takes two readings
of its logits; a draw reads the sums of tiles, and then the tile that contains it. The plain operations are the oracle.
"""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from engine.kernels import compiled_for_cpu
from engine.kernels.numba_numbers import EXACT, FAST, exponential, from_order, order

_TILE = 1024
_DIGIT = 10
"""Bits of a probability by which tokens are sorted at a time; three times are all bits of a number up to 1."""
_MOST_ROUGH = 0.999
_LEAST_LOG = np.float32(-87)
"""Tokens whose logit over temperature is this far below the largest have probability 0: it would be below 2e-38."""
# No reciprocals: that of a tiny temperature overflows.
_DIVIDED = FAST | {"fastmath": {"contract", "reassoc", "nsz"}}


@compiled_for_cpu(**_DIVIDED)
def law_of(logits, temperature, law):
    """Compute the law of one row; return the largest logit, or NaN if any is NaN."""
    width = len(logits)
    largest = np.int32(-0x80000000)
    for column in range(width):
        largest = max(largest, order(logits[column]))
    most = from_order(largest)
    total = 0.0
    for start in range(0, width, _TILE):
        of_tile = np.float32(0)
        for column in range(start, min(start + _TILE, width)):
            # The largest is subtracted first: at tiny temperatures the quotients alone would overflow.
            log = (logits[column] - most) / temperature
            share = exponential(log)
            share = np.float32(0) if log < _LEAST_LOG else share
            law[column] = share
            of_tile += share
        total += np.float64(of_tile)
    scale = np.float32(1 / total)
    for column in range(width):
        law[column] *= scale
    return np.float64(most) if total == total else math.nan


@compiled_for_cpu(**EXACT)
def _softmax(logits, temperatures, law):
    for row in range(len(logits)):
        law_of(logits[row], temperatures[row], law[row])


@compiled_for_cpu(**EXACT)
def likeliest(logits):
    """Return (the first of the most likely tokens, its logit, or NaN if any logit is NaN)."""
    largest, has_nan = np.int32(-0x80000000), False
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
def keep_nucleus(law, top_p):
    """Keep the smallest set of most likely tokens of a row with mass >= top_p, ties included, and normalise it.

    The probability at the set's edge is found ten bits at a time, from the mass of each group with equal leading bits.
    """
    sums = np.empty(1 << _DIGIT)
    # Tokens below share less than half of what may be left out; rounding of the others stays within the other half.
    least = np.float32(0.5 * (1 - top_p) / len(law)) if top_p < _MOST_ROUGH else np.float32(0)
    edge, mass = np.int64(0), 0.0
    for shift in (2 * _DIGIT, _DIGIT, 0):
        sums[:] = 0
        for column in range(len(law)):
            place = np.int64(order(law[column])) >> shift
            if law[column] >= least and place >> _DIGIT == edge:
                sums[place & ((1 << _DIGIT) - 1)] += np.float64(law[column])
        chosen = 0
        for digit in range((1 << _DIGIT) - 1, -1, -1):
            if sums[digit] > 0:
                chosen = digit
                if mass + sums[digit] >= top_p:
                    break
                mass += sums[digit]
        edge = (edge << _DIGIT) | chosen
    lowest, total = from_order(np.int32(edge)), 0.0
    for column in range(len(law)):
        law[column] = law[column] if law[column] >= lowest else np.float32(0)
        total += np.float64(law[column])
    scale = np.float32(1 / total)
    for column in range(len(law)):
        law[column] *= scale


@compiled_for_cpu(**EXACT)
def _nucleus(law, top_ps):
    for row in range(len(law)):
        if top_ps[row] < 1:
            keep_nucleus(law[row], top_ps[row])


@compiled_for_cpu(**FAST)
def mass_of(target, draft, weight, of_surplus, column):
    """Return the target's probability of a token, or its surplus (weight * target - draft)+."""
    mass = target[column]
    if of_surplus:
        mass = weight * mass - draft[column]
        mass = np.float32(0) if mass < np.float32(0) else mass
    return mass


@compiled_for_cpu(**FAST)
def sum_of(target, draft, weight, of_surplus, start, stop):
    """Return the sum of the masses of these tokens, in float64."""
    total = 0.0
    for column in range(start, stop):
        total += np.float64(mass_of(target, draft, weight, of_surplus, column))
    return total


@compiled_for_cpu(**FAST)
def draw_from(target, draft, weight, of_surplus, uniform):
    """Draw a token from the surplus, if `of_surplus` and there is any, else from the target's law.

    It is the first whose cumulative mass exceeds `uniform` times the sum, as in `draw.categorical`.
    """
    width = len(target)
    num_tiles = (width + _TILE - 1) // _TILE
    sums = np.empty(num_tiles)
    while True:
        total = 0.0
        for tile in range(num_tiles):
            start = tile * _TILE
            sums[tile] = sum_of(target, draft, weight, of_surplus, start, min(start + _TILE, width))
            total += sums[tile]
        if total > 0 or not of_surplus:
            break
        of_surplus = False
    bound = uniform * total
    before, chosen, so_far = 0.0, 0, 0.0
    for tile in range(num_tiles):
        if sums[tile] > 0:
            # Rounding may put the bound after the last tile, or token, that has mass.
            chosen, before = tile, so_far
            so_far += sums[tile]
            if so_far > bound:
                break
    token = chosen * _TILE
    for column in range(token, min(token + _TILE, width)):
        mass = np.float64(mass_of(target, draft, weight, of_surplus, column))
        if mass > 0:
            token = column
            before += mass
            if before > bound:
                break
    return token


@compiled_for_cpu(**EXACT)
def _draw(law, rows, uniforms, tokens):
    for number in range(len(rows)):
        row = law[rows[number]]
        tokens[number] = draw_from(row, row, np.float32(1), False, uniforms[number])


def softmax(logits_NV: Tensor, temperature_N: Tensor, law_NV: Tensor | None = None) -> Tensor:
    """Return [N, V] float32 laws of float32 logits at positive temperatures; `law_NV` is the output, if given."""
    law_NV = torch.empty_like(logits_NV) if law_NV is None else law_NV
    # A kernel checks no bounds.
    assert temperature_N.shape == logits_NV.shape[:1], "one temperature for each row"
    assert law_NV.shape == logits_NV.shape, "one law for each row"
    _softmax(logits_NV.contiguous().numpy(), temperature_N.contiguous().numpy(), law_NV.numpy())
    return law_NV


def nucleus(law_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Return `Kernels.nucleus` of float32 rows."""
    assert top_p_N.shape == law_NV.shape[:1], "one top_p for each row"
    law_NV = law_NV.clone()
    _nucleus(law_NV.numpy(), top_p_N.contiguous().numpy())
    return law_NV


def draw(law_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
    """Return [C] a token from each of the law's rows."""
    token_C = torch.empty_like(row_C)
    _draw(law_NV.numpy(), row_C.contiguous().numpy(), uniform_C.contiguous().numpy(), token_C.numpy())
    return token_C
