"""Edges of top-k and top-p in Triton, without sorting a row and without waiting for the device.

Tokens are kept if their key is not below an edge: the largest number such that the tokens at and
above it are k, or have the wanted mass. Keys are the bits of non-negative numbers, which have the
same order as the numbers: of the probabilities for top-p, and of the distances from the most likely
token's logit for top-k. The edge is found digit by digit: a round counts (or sums the mass of) the
tokens at and above sixteen candidates, by tiles. The next round takes the largest candidate that
has enough. After eight rounds all 32 bits are known. Sums are added in a fixed order, so a
distribution is a function of its logits. Rows that do not ask for the filter end at once.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests).
`torch_kernels.py` has the oracle.
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda import row_kernels
from engine.cuda.row_kernels import ANYWHERE, scaled_of
from engine.kernels.protocol import Filters

TILE = 2048
_DIGITS = tl.constexpr(16)
_ROUNDS = 8
_INFINITY = tl.constexpr(0x7F800000)
"""Bits of the largest number; a token's key is this minus the bits of its distance."""


@triton.jit
def _chosen(sums, wanted, num_tiles, tiles: tl.constexpr):
    """Return (largest candidate that has enough, its sum); candidate 0 has, up to rounding."""
    tile, digit = tl.arange(0, tiles), tl.arange(0, _DIGITS)
    tile_sums = tl.load(sums + tile[:, None] * _DIGITS + digit[None, :], mask=(tile < num_tiles)[:, None], other=0.0)
    mass = tl.sum(tile_sums, axis=0)
    enough = (mass >= wanted) & (mass > 0)
    chosen = tl.max(tl.where(enough, digit, 0), axis=0)
    return chosen, tl.sum(tl.where(digit == chosen, mass, 0.0), axis=0)


@triton.jit
def _is_asked_for(wanted, by_count: tl.constexpr):
    if by_count:
        return wanted > 0
    return wanted < 1


@triton.jit(do_not_specialize=("num_rows", "number"), do_not_specialize_on_alignment=ANYWHERE)
def _narrow(
    numbers, largest, temperatures, wanted, lowest, sums, width, row_stride, num_rows, num_tiles, num_parts, number,
    tile: tl.constexpr, tiles: tl.constexpr, parts: tl.constexpr, by_count: tl.constexpr,
):  # fmt: skip
    """Evaluate the last round, and sum a tile at and above sixteen new candidates.

    numbers: logits if tokens are counted, else probabilities.
    """
    row, tile_number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    needed = tl.load(wanted + row).to(tl.float64)
    if not _is_asked_for(needed, by_count):
        return
    size = num_tiles * _DIGITS
    # Value of one digit of the round.
    worth = tl.full([], 1, tl.int64) << (28 - 4 * number).to(tl.int64)
    low = tl.full([], 0, tl.int64)
    if number > 0:
        digit, _ = _chosen(sums + ((number - 1) * num_rows + row) * size, needed, num_tiles, tiles)
        low = tl.load(lowest + (number - 1) * num_rows + row) + digit * worth * 16
    if tile_number == 0:
        tl.store(lowest + number * num_rows + row, low)
    column = tile_number * tile + tl.arange(0, tile)
    inside = column < width
    value = tl.load(numbers + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = value
    if by_count:
        part = tl.arange(0, parts)
        whole = tl.max(tl.load(largest + row * num_parts + part, mask=part < num_parts, other=-1e30), axis=0)
        distance = tl.abs(scaled_of(value, whole, tl.load(temperatures + row)))
        key = tl.where(inside, -distance.to(tl.int32, bitcast=True).to(tl.int64) + _INFINITY, -1)
        weight = tl.full([tile], 1.0, tl.float32)
    else:
        key = value.to(tl.int32, bitcast=True).to(tl.int64)
    to = sums + (number * num_rows + row) * size + tile_number * _DIGITS
    # Most tiles of later rounds: no token is at or above any candidate.
    if tl.max(key, axis=0) < low:
        tl.store(to + tl.arange(0, _DIGITS), tl.zeros([_DIGITS], tl.float64))
    else:
        for digit in tl.static_range(_DIGITS):
            tl.store(to + digit, tl.sum(tl.where(key >= low + digit * worth, weight, 0.0).to(tl.float64), axis=0))


@triton.jit(do_not_specialize=("num_rows", "number"), do_not_specialize_on_alignment=ANYWHERE)
def _keep(
    probs, top_ps, lowest, sums, kept, width, num_rows, num_tiles, number, tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """Evaluate the last round of top-p: the edge, and the mass that is kept."""
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(top_ps + row).to(tl.float64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    value = tl.load(probs + row * width + column, mask=column < width, other=0.0)
    if _is_asked_for(top_p, False):
        before = sums + ((number - 1) * num_rows + row) * num_tiles * _DIGITS
        digit, mass = _chosen(before, top_p, num_tiles, tiles)
        edge = tl.load(lowest + (number - 1) * num_rows + row) + digit
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        value = tl.where(bits >= edge, value / mass.to(tl.float32), 0.0)
    tl.store(kept + row * width + column, value, mask=column < width)


@triton.jit(do_not_specialize=("num_rows", "number"), do_not_specialize_on_alignment=ANYWHERE)
def _edge(top_ks, lowest, sums, edges, num_rows, num_tiles, number, tiles: tl.constexpr):
    """Evaluate the last round of top-k: raise the row's edge to it."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row).to(tl.float64)
    if _is_asked_for(top_k, True):
        before = sums + ((number - 1) * num_rows + row) * num_tiles * _DIGITS
        digit, _ = _chosen(before, top_k, num_tiles, tiles)
        key = tl.load(lowest + (number - 1) * num_rows + row) + digit
        edge = -(-key + _INFINITY).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(edges + row, tl.maximum(tl.load(edges + row), edge))


def nucleus(probs_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Return [N, V] each row's smallest set with mass >= top_p, with ties, normalised.

    probs_NV: float32; a row with top_p of 1 or more is unchanged.
    """
    probs_NV = probs_NV.contiguous()
    num_rows, width = probs_NV.shape
    kept_NV = torch.empty_like(probs_NV)
    if num_rows:
        top_p_N = top_p_N.contiguous()
        lowest, sums = _searched(probs_NV, probs_NV[:, :0], top_p_N, top_p_N, by_count=False)
        num_tiles = sums.shape[2]
        _keep[(num_rows, num_tiles)](
            probs_NV, top_p_N, lowest, sums, kept_NV, width, num_rows, num_tiles, _ROUNDS,
            tile=TILE, tiles=triton.next_power_of_2(num_tiles),
        )  # fmt: skip
    return kept_NV


def truncated(logits_NV: Tensor, temperature_N: Tensor, filters: Filters) -> Tensor:
    logits_NV = logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()
    temperature_N = temperature_N.contiguous()

    def edges_of(largest_NT: Tensor) -> Tensor:
        """Return [N] the least logit over temperature, with maximum 0, that both filters keep."""
        edge_N = torch.full_like(temperature_N, -torch.inf) if filters.min_p_N is None else filters.min_p_N.log()
        if filters.top_k_N is not None:
            top_k_N = filters.top_k_N.contiguous()
            lowest, sums = _searched(logits_NV, largest_NT, temperature_N, top_k_N, by_count=True)
            num_rows, num_tiles = sums.shape[1:3]
            _edge[(num_rows,)](
                top_k_N, lowest, sums, edge_N, num_rows, num_tiles, _ROUNDS, tiles=triton.next_power_of_2(num_tiles)
            )
        return edge_N

    return row_kernels.softmax(logits_NV, temperature_N, edges_of=edges_of)


def _searched(
    number_NV: Tensor, largest_NT: Tensor, temperature_N: Tensor, wanted_N: Tensor, by_count: bool
) -> tuple[Tensor, Tensor]:
    """Return ([rounds, N] least candidate, [rounds, N, tiles, digits] sums at and above)."""
    num_rows, width = number_NV.shape
    num_tiles, num_parts = triton.cdiv(width, TILE), largest_NT.shape[1]
    lowest = torch.empty((_ROUNDS, num_rows), dtype=torch.int64, device=number_NV.device)
    sums = torch.empty((_ROUNDS, num_rows, num_tiles, 16), dtype=torch.float64, device=number_NV.device)
    for number in range(_ROUNDS):
        _narrow[(num_rows, num_tiles)](
            number_NV, largest_NT, temperature_N, wanted_N, lowest, sums,
            width, number_NV.stride(0), num_rows, num_tiles, num_parts, number,
            tile=TILE, tiles=triton.next_power_of_2(num_tiles), parts=triton.next_power_of_2(max(1, num_parts)),
            by_count=by_count,
        )  # fmt: skip
    return lowest, sums
