"""Top-p in Triton, without sorting a row and without waiting for the device.

Tokens are kept if their probability is not below an edge: the largest number for which they together have the wanted
mass. Numbers from 0 to 1 have the same order as their bits, so the edge is found digit by digit: a round sums, by
tiles, the mass at and above sixteen candidates; the next round takes the largest that has enough. After eight rounds
all 32 bits are known. Sums are added in a fixed order, so a law is a function of its logits.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests). `torch_kernels.py` has the oracle.
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
_DIGITS = tl.constexpr(16)
_ROUNDS = 8


@triton.jit
def _chosen(sums, top_p, num_tiles, tiles: tl.constexpr):
    """Return (the largest candidate with the wanted mass, that mass); candidate 0 has it, except for rounding."""
    tile, digit = tl.arange(0, tiles), tl.arange(0, _DIGITS)
    of_tile = tl.load(sums + tile[:, None] * _DIGITS + digit[None, :], mask=(tile < num_tiles)[:, None], other=0.0)
    mass = tl.sum(of_tile, axis=0)
    enough = (mass >= top_p) & (mass > 0)
    chosen = tl.max(tl.where(enough, digit, 0), axis=0)
    return chosen, tl.sum(tl.where(digit == chosen, mass, 0.0), axis=0)


@triton.jit(do_not_specialize=("num_rows", "number"))
def _narrow(
    law, top_ps, lowest, sums, width, num_rows, num_tiles, number, tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Run a round: evaluate the last one, then sum the mass at and above sixteen new candidates in a tile."""
    row, tile_number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = num_tiles * _DIGITS
    low = tl.load(lowest + number * num_rows + row)
    # Value of one digit of the round.
    worth = tl.full([], 1, tl.int64) << (28 - 4 * number).to(tl.int64)
    if number > 0:
        top_p = tl.load(top_ps + row).to(tl.float64)
        before = sums + ((number - 1) * num_rows + row) * size
        digit, _ = _chosen(before, top_p, num_tiles, tiles)
        low = tl.load(lowest + (number - 1) * num_rows + row) + digit * worth * 16
        if tile_number == 0:
            tl.store(lowest + number * num_rows + row, low)
    column = tile_number * tile + tl.arange(0, tile)
    value = tl.load(law + row * width + column, mask=column < width, other=0.0)
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    to = sums + (number * num_rows + row) * size + tile_number * _DIGITS
    for digit in tl.static_range(_DIGITS):
        mass = tl.sum(tl.where(bits >= low + digit * worth, value, 0.0).to(tl.float64), axis=0)
        tl.store(to + digit, mass)


@triton.jit(do_not_specialize=("num_rows", "number"))
def _keep(
    law, top_ps, lowest, sums, kept, width, num_rows, num_tiles, number, tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Evaluate the last round: the edge, and the mass that is kept."""
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_ps + row).to(tl.float64)
    before = sums + ((number - 1) * num_rows + row) * num_tiles * _DIGITS
    digit, mass = _chosen(before, top_p, num_tiles, tiles)
    edge = tl.load(lowest + (number - 1) * num_rows + row) + digit
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    value = tl.load(law + row * width + column, mask=column < width, other=0.0)
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    share = tl.where(bits >= edge, value / mass.to(tl.float32), 0.0)
    tl.store(kept + row * width + column, tl.where(top_p < 1, share, value), mask=column < width)


def nucleus(law_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Return [N, V] each row's smallest set of most likely tokens with mass >= top_p, with ties, normalised.

    law_NV: float32; a row with top_p of 1 or more is unchanged.
    """
    law_NV = law_NV.contiguous()
    num_rows, width = law_NV.shape
    kept_NV = torch.empty_like(law_NV)
    if not num_rows:
        return kept_NV
    num_tiles = triton.cdiv(width, _TILE)
    lowest = torch.zeros((_ROUNDS, num_rows), dtype=torch.int64, device=law_NV.device)
    sums = torch.empty((_ROUNDS, num_rows, num_tiles, 16), dtype=torch.float64, device=law_NV.device)
    operands, grid = (law_NV, top_p_N.contiguous(), lowest, sums), (num_rows, num_tiles)
    constants = {"tile": _TILE, "tiles": triton.next_power_of_2(num_tiles)}
    for number in range(_ROUNDS):
        _narrow[grid](*operands, width, num_rows, num_tiles, number, **constants)
    _keep[grid](*operands, kept_NV, width, num_rows, num_tiles, _ROUNDS, **constants)
    return kept_NV
