"""Rows of the vocabulary in Triton: distributions, sums and draws, without copies of rows.

Torch's own operations write an intermediate row for every step, in float64 for a draw. Here a
distribution takes two readings of its logits. Quantities of two distributions (the mass by which
one exceeds the other, and a token drawn from it) are computed in place by tiles of a row: a row's
sum is that of its tiles, and a draw reads only the tile that contains it again.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests).
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# A step that needs a new specialisation of a kernel waits for the compiler. So none depends on
# whether small arrays, or their parts by level, begin at a multiple of 16 bytes, as some do for
# even numbers of rows.
ANYWHERE = (
    *("temperatures", "largest", "totals", "edges", "wanted", "lowest", "sums", "top_ks", "top_ps", "uniforms"),
    *("tokens", "target_rows", "draft_rows", "lengths", "log_ratios", "log_ceilings", "weights"),
    *("surplus_sums", "target_sums", "accept_numbers", "residual_numbers", "score_numbers"),
    *("accepted", "scores", "requests", "verdict"),
)
TILE = 1024
SOFTMAX_TILE = 4096


@triton.jit
def scaled_of(value, whole, temperature):
    """Return logits over temperature, with maximum 0, to the bit as plain torch's."""
    return tl.div_rn(value - whole, temperature)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _sum_exponentials(
    logits, temperatures, largest, totals, edges, width, row_stride, num_tiles,
    tile: tl.constexpr, tiles: tl.constexpr, has_edges: tl.constexpr,
):  # fmt: skip
    """Write the sum of a tile's exponentials, relative to its largest logit.

    The largest logit is written without edges. With edges only tokens at or above the
    row's edge are summed.
    """
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    column = number * tile + tl.arange(0, tile)
    value = tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
    # Finite, so that differences of masked tokens are defined.
    tile_largest = tl.maximum(tl.max(value, axis=0), -1e30)
    # The maximum is subtracted first: at tiny temperatures the quotients alone would overflow.
    weight = tl.exp((value - tile_largest) / temperature)
    if has_edges:
        place = tl.arange(0, tiles)
        whole = tl.max(tl.load(largest + row * num_tiles + place, mask=place < num_tiles, other=-1e30), axis=0)
        weight = tl.where(scaled_of(value, whole, temperature) >= tl.load(edges + row), weight, 0.0)
    else:
        tl.store(largest + row * num_tiles + number, tile_largest)
    tl.store(totals + row * num_tiles + number, tl.sum(weight, axis=0))


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _softmax(
    logits, temperatures, largest, totals, edges, probs, width, row_stride, num_tiles,
    tile: tl.constexpr, tiles: tl.constexpr, has_edges: tl.constexpr,
):  # fmt: skip
    """Write a tile of a distribution, from the largest logits and sums of all its tiles."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    place = tl.arange(0, tiles)
    tile_largest = tl.load(largest + row * num_tiles + place, mask=place < num_tiles, other=-1e30)
    sums = tl.load(totals + row * num_tiles + place, mask=place < num_tiles, other=0.0)
    whole = tl.max(tile_largest, axis=0)
    total = tl.sum(sums * tl.exp((tile_largest - whole) / temperature), axis=0)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    value = tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
    share = tl.exp((value - whole) / temperature) / total
    if has_edges:
        share = tl.where(scaled_of(value, whole, temperature) >= tl.load(edges + row), share, 0.0)
    tl.store(probs + row * width + column, share, mask=column < width)


@triton.jit
def weights_of(target, draft, weight, column, width, has_draft: tl.constexpr):
    """Return (the mass (weight * target - draft)+ of some tokens, the target's mass)."""
    mass = tl.load(target + column, mask=column < width, other=0.0)
    surplus = mass
    if has_draft:
        taken = tl.load(draft + column, mask=column < width, other=0.0)
        surplus = tl.maximum(weight.to(mass.dtype) * mass - taken, 0.0)
    return surplus, mass


@triton.jit(do_not_specialize=("num_targets", "num_drafts"), do_not_specialize_on_alignment=ANYWHERE)
def sum_tiles(
    target, target_rows, draft, draft_rows, weights, surplus_sums, target_sums,
    width, num_tiles, num_targets, num_drafts, tile: tl.constexpr, has_draft: tl.constexpr,
):  # fmt: skip
    """Sum over a tile of a target row its surplus over a draft row, and its distribution.

    A chain has `num_targets` target rows in order, and `num_drafts` draft rows; the last of these
    serves those that are left.
    """
    at, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = number * tile + tl.arange(0, tile)
    place = at // num_targets * num_drafts + tl.minimum(at % num_targets, num_drafts - 1)
    row, other = tl.load(target_rows + at), tl.load(draft_rows + place)
    surplus, mass = weights_of(
        target + row * width, draft + other * width, tl.load(weights + at), column, width, has_draft
    )
    tl.store(surplus_sums + at * num_tiles + number, tl.sum(surplus.to(tl.float64), axis=0))
    tl.store(target_sums + at * num_tiles + number, tl.sum(mass.to(tl.float64), axis=0))


@triton.jit
def draw_token(
    target, draft, weight, wanted, surplus_sums, target_sums, uniform, width, num_tiles,
    tile: tl.constexpr, tiles: tl.constexpr, has_draft: tl.constexpr,
):  # fmt: skip
    """Draw a token from the surplus, or the target if that is not wanted or empty."""
    number = tl.arange(0, tiles)
    is_tile = number < num_tiles
    tile_surplus = tl.load(surplus_sums + number, mask=is_tile, other=0.0)
    tile_mass = tl.load(target_sums + number, mask=is_tile, other=0.0)
    from_surplus = wanted & (tl.sum(tile_surplus, axis=0) > 0)
    tile_sums = tl.where(from_surplus, tile_surplus, tile_mass)
    cumulative = tl.cumsum(tile_sums, axis=0)
    bound = uniform * tl.max(cumulative, axis=0)
    # Rounding may put the number after the last tile, or token, that has mass.
    reached = tl.min(tl.where((cumulative > bound) & (tile_sums > 0), number, tiles), axis=0)
    chosen = tl.minimum(reached, tl.max(tl.where(tile_sums > 0, number, 0), axis=0))
    rest = bound - tl.sum(tl.where(number < chosen, tile_sums, 0.0), axis=0)
    place = tl.arange(0, tile)
    surplus, mass = weights_of(target, draft, weight, chosen * tile + place, width, has_draft)
    weights = tl.where(from_surplus, surplus, mass).to(tl.float64)
    first = tl.min(tl.where((tl.cumsum(weights, axis=0) > rest) & (weights > 0), place, tile), axis=0)
    last = tl.max(tl.where(weights > 0, place, 0), axis=0)
    return chosen * tile + tl.minimum(first, last)


@triton.jit(do_not_specialize_on_alignment=ANYWHERE)
def _draw(
    target, target_rows, draft, draft_rows, weights, wanted, surplus_sums, target_sums, uniforms, tokens,
    width, num_tiles, tile: tl.constexpr, tiles: tl.constexpr, has_draft: tl.constexpr,
):  # fmt: skip
    chain = tl.program_id(0)
    row, other = tl.load(target_rows + chain), tl.load(draft_rows + chain)
    is_wanted = tl.full([], 1, tl.int1)
    if has_draft:
        is_wanted = tl.load(wanted + chain) != 0
    token = draw_token(
        target + row * width, draft + other * width, tl.load(weights + chain), is_wanted,
        surplus_sums + chain * num_tiles, target_sums + chain * num_tiles, tl.load(uniforms + chain), width, num_tiles,
        tile, tiles, has_draft,
    )  # fmt: skip
    tl.store(tokens + chain, token.to(tl.int64))


def softmax(
    logits_NV: Tensor,
    temperature_N: Tensor,
    probs_NV: Tensor | None = None,
    edges_of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return [N, V] float32 distributions of logits at temperatures > 0.

    probs_NV: output, if given. edges_of: returns [N] the least logit over temperature (with maximum
    0) that each row keeps, from the largest logits [N, tiles] of parts of the row.
    """
    logits_NV = logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()
    num_rows, width = logits_NV.shape
    if probs_NV is None:
        probs_NV = torch.empty((num_rows, width), dtype=torch.float32, device=logits_NV.device)
    assert probs_NV.is_contiguous(), "a distribution's rows must be contiguous"
    if num_rows:
        temperature_N = temperature_N.contiguous()
        num_tiles = triton.cdiv(width, SOFTMAX_TILE)
        largest_NT, total_NT = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=logits_NV.device)
        operands, sizes = (logits_NV, temperature_N, largest_NT, total_NT), (width, logits_NV.stride(0), num_tiles)
        constants = {"tile": SOFTMAX_TILE, "tiles": triton.next_power_of_2(num_tiles)}
        grid, edge_N, has_edges = (num_rows, num_tiles), temperature_N, edges_of is not None
        _sum_exponentials[grid](*operands, edge_N, *sizes, **constants, has_edges=False)
        if edges_of is not None:
            edge_N = edges_of(largest_NT)
            _sum_exponentials[grid](*operands, edge_N, *sizes, **constants, has_edges=True)
        _softmax[grid](*operands, edge_N, probs_NV, *sizes, **constants, has_edges=has_edges)
    return probs_NV


class Subtracted(NamedTuple):
    """Draft rows that are subtracted from C target rows."""

    draft_MV: Tensor
    row_C: Tensor
    weight_C: Tensor
    """Weight of the target, float64."""
    wanted_C: Tensor
    """Whether the surplus is drawn from, and not the target."""


def draw(target_NV: Tensor, row_C: Tensor, uniform_C: Tensor, less: Subtracted | None = None) -> Tensor:
    """Return [C] tokens from target rows, or from (weight * target - draft)+ if wanted.

    From the target where that is empty. target_NV, draft_MV: distributions, contiguous.
    """
    row_C = row_C.contiguous()
    # Without draft rows the other arrays are not read.
    draft_MV, *others = (target_NV, row_C, row_C, row_C) if less is None else less
    assert target_NV.is_contiguous(), "a distribution's rows must be contiguous"
    assert draft_MV.is_contiguous(), "a distribution's rows must be contiguous"
    draft_row_C, weight_C, wanted_C = (one.contiguous() for one in others)
    wanted_C = wanted_C if less is None else wanted_C.view(torch.int8)
    num_chains, width = len(row_C), target_NV.shape[1]
    num_tiles, token_C = triton.cdiv(width, TILE), torch.empty_like(row_C)
    surplus_CT, target_CT = torch.empty((2, num_chains, num_tiles), dtype=torch.float64, device=target_NV.device)
    if num_chains:
        rows, sizes = (target_NV, row_C, draft_MV, draft_row_C, weight_C), (width, num_tiles)
        constants = {"tile": TILE, "has_draft": less is not None}
        sum_tiles[(num_chains, num_tiles)](*rows, surplus_CT, target_CT, *sizes, 1, 1, **constants)
        _draw[(num_chains,)](
            *rows, wanted_C, surplus_CT, target_CT, uniform_C.contiguous(), token_C, *sizes,
            tiles=triton.next_power_of_2(num_tiles), **constants,
        )  # fmt: skip
    return token_C
