"""Rows of the vocabulary in Triton: laws, sums and draws that leave nothing as large as a row behind.

Torch's own operations write an intermediate row for every one of their steps, in float64 for a draw. Here a law is made
in two readings of its logits, and what rules need of two laws (the mass by which one exceeds the other, and a token
drawn from it) is computed from the laws where they lie, by tiles of a row: a row's sum is that of its tiles, and of a
draw only the tile it falls into is looked at again.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests). `fused.py` decides where.
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.draw import categorical

_TILE = 1024
_LAW_TILE = 4096


@triton.jit
def _softmax(logits, temperatures, law, width, row_stride, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    # Finite, so that differences of masked tokens are defined.
    largest, total = -1e30, 0.0
    for begin in range(0, width, tile):
        column = begin + tl.arange(0, tile)
        value = tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(value, axis=0))
        # The maximum goes first: at tiny temperatures the quotients alone would overflow.
        fade = tl.exp((largest - new_largest) / temperature)
        total = total * fade + tl.sum(tl.exp((value - new_largest) / temperature), axis=0)
        largest = new_largest
    for begin in range(0, width, tile):
        column = begin + tl.arange(0, tile)
        value = tl.load(logits + row * row_stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
        share = tl.exp((value - largest) / temperature) / total
        tl.store(law + row * width + column, share, mask=column < width)


@triton.jit
def _weights(target, draft, weight, column, width, has_draft: tl.constexpr):
    """(the mass (weight * target - draft)+ of some tokens, the target's)."""
    mass = tl.load(target + column, mask=column < width, other=0.0)
    surplus = mass
    if has_draft:
        taken = tl.load(draft + column, mask=column < width, other=0.0)
        surplus = tl.maximum(weight.to(mass.dtype) * mass - taken, 0.0)
    return surplus, mass


@triton.jit
def _sum_tiles(
    target, target_rows, draft, draft_rows, weights, surplus_sums, target_sums,
    width, num_tiles, tile: tl.constexpr, has_draft: tl.constexpr,
):  # fmt: skip
    chain, number = tl.program_id(0), tl.program_id(1)
    column = number * tile + tl.arange(0, tile)
    row, other = tl.load(target_rows + chain), tl.load(draft_rows + chain)
    surplus, mass = _weights(
        target + row * width, draft + other * width, tl.load(weights + chain), column, width, has_draft
    )
    at = chain * num_tiles + number
    tl.store(surplus_sums + at, tl.sum(surplus.to(tl.float64), axis=0))
    tl.store(target_sums + at, tl.sum(mass.to(tl.float64), axis=0))


@triton.jit
def _draw_in_tile(
    target, target_rows, draft, draft_rows, weights, from_surplus, tiles, rests, tokens,
    width, tile: tl.constexpr, has_draft: tl.constexpr,
):  # fmt: skip
    chain = tl.program_id(0)
    place = tl.arange(0, tile)
    column = tl.load(tiles + chain) * tile + place
    row, other = tl.load(target_rows + chain), tl.load(draft_rows + chain)
    surplus, mass = _weights(
        target + row * width, draft + other * width, tl.load(weights + chain), column, width, has_draft
    )
    chosen = tl.where(tl.load(from_surplus + chain) != 0, surplus, mass).to(tl.float64)
    reached = (tl.cumsum(chosen, axis=0) > tl.load(rests + chain)) & (chosen > 0)
    first = tl.min(tl.where(reached, place, tile), axis=0)
    # Rounding may leave the number behind the last token that has mass.
    last = tl.max(tl.where(chosen > 0, place, 0), axis=0)
    tl.store(tokens + chain, tl.load(tiles + chain) * tile + tl.minimum(first, last))


def softmax(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """[N, V] float32 laws of logits of any float type at positive temperatures."""
    logits_NV = logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()
    num_rows, width = logits_NV.shape
    law_NV = torch.empty((num_rows, width), dtype=torch.float32, device=logits_NV.device)
    if num_rows:
        _softmax[(num_rows,)](logits_NV, temperature_N.contiguous(), law_NV, width, logits_NV.stride(0), tile=_LAW_TILE)
    return law_NV


class Surplus:
    """Of C pairs of rows the mass (weight * target - draft)+; a target row alone where there is no draft law."""

    def __init__(
        self,
        target_NV: Tensor,
        target_row_C: Tensor,
        weight_C: Tensor | None = None,
        draft_MV: Tensor | None = None,
        draft_row_C: Tensor | None = None,
    ) -> None:
        """target_NV, draft_MV: laws, row after row in memory; weight_C: float64."""
        assert target_NV.is_contiguous(), "a law's rows follow each other"
        self._has_draft = draft_MV is not None
        self._target_row_C = target_row_C.contiguous()
        draft_row_C = self._target_row_C if draft_row_C is None else draft_row_C.contiguous()
        weight_C = torch.ones_like(target_row_C, dtype=torch.float64) if weight_C is None else weight_C
        draft_MV = target_NV if draft_MV is None else draft_MV
        assert draft_MV.is_contiguous(), "a law's rows follow each other"
        self._operands = (target_NV, self._target_row_C, draft_MV, draft_row_C, weight_C.contiguous())
        self._width, self._num_chains = target_NV.shape[1], len(target_row_C)
        self._num_tiles = triton.cdiv(self._width, _TILE)
        shape = (self._num_chains, self._num_tiles)
        self._surplus_CT, self._target_CT = (
            torch.empty(shape, dtype=torch.float64, device=target_NV.device) for _ in range(2)
        )
        if self._num_chains:
            _sum_tiles[shape](
                *self._operands, self._surplus_CT, self._target_CT,
                self._width, self._num_tiles, tile=_TILE, has_draft=self._has_draft,
            )  # fmt: skip

    def sum(self) -> Tensor:
        """[C] float64."""
        return self._surplus_CT.sum(1)

    def draw(self, uniform_C: Tensor, wanted_C: Tensor | None = None) -> Tensor:
        """[C] a token from each surplus; from the target law where `wanted_C` is false or nothing is left."""
        usable_C = self.sum() > 0
        if wanted_C is not None:
            usable_C &= wanted_C
        sums_CT = torch.where(usable_C.unsqueeze(1), self._surplus_CT, self._target_CT)
        tile_C = categorical(sums_CT, uniform_C)
        cumulative_CT = sums_CT.cumsum(1)
        before_CT = cumulative_CT - sums_CT
        rest_C = uniform_C.double() * cumulative_CT[:, -1] - before_CT.gather(1, tile_C.unsqueeze(1)).squeeze(1)
        token_C = torch.empty_like(tile_C)
        if self._num_chains:
            _draw_in_tile[(self._num_chains,)](
                *self._operands, usable_C.to(torch.int32), tile_C, rest_C, token_C,
                self._width, tile=_TILE, has_draft=self._has_draft,
            )  # fmt: skip
        return token_C
