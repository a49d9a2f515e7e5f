"""Operations of a decoder layer between its products, in one Triton kernel each.

The speed of a pass over few tokens of a large model is bound by the number of its kernels. Between
the four products of a layer there are norms (two), the operations on q, k and v (norm, rotation,
writing K/V), attention (`attention_kernel.py`), and the gate; a residual sum belongs to its
product. Numbers are rounded to the model's dtype no more often than by transformers.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests). `lean_decoder.py` decides
where; its plain operations are the oracle.
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GATE_TILE = 1024
_ROUNDED_TILE = 8192
NORM_WARPS, HEAD_WARPS = 8, 1
"""Warps of a row's norm, and of a head's rotation, where one warp waits for no other."""


@triton.jit
def _norm(hidden, weight, normed, width, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(hidden + row + column, mask=inside, other=0.0).to(tl.float32)
    # Loaded before the sum, after which all threads wait for each other.
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(normed + row + column, value * scale * factor, mask=inside)


@triton.jit
def _rotate_and_write(
    joined, cosines, sines, positions, query_norm, key_norm, slots, query, keys, values,
    num_positions, num_heads, num_kv_heads, eps,
    head_dim: tl.constexpr, block: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, block)
    inside = column < head_dim
    head_values = joined + (token * (num_heads + 2 * num_kv_heads) + head) * head_dim
    value = tl.load(head_values + column, mask=inside, other=0.0)
    slot = tl.load(slots + token)
    if head >= num_heads + num_kv_heads:
        to = values + (slot * num_kv_heads + head - num_heads - num_kv_heads) * head_dim
        tl.store(to + column, value, mask=inside)
    else:
        # Rotation by halves: each number is paired with the one at its place in the other half.
        other_column = tl.where(column < head_dim // 2, column + head_dim // 2, column - head_dim // 2)
        other = tl.load(head_values + other_column, mask=inside, other=0.0)
        # A node after the longest text is drafted, and never emitted.
        place = tl.minimum(tl.load(positions + token), num_positions - 1) * head_dim
        cosine = tl.load(cosines + place + column, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + place + column, mask=inside, other=0.0).to(tl.float32)
        first, second = value.to(tl.float32), other.to(tl.float32)
        if has_norm:
            norm = query_norm
            if head >= num_heads:
                norm = key_norm
            factor = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
            other_factor = tl.load(norm + other_column, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(first * first, axis=0) / head_dim + eps)
            first, second = first * scale * factor, second * scale * other_factor
            first, second = first.to(value.dtype).to(tl.float32), second.to(value.dtype).to(tl.float32)
        rotated = first * cosine + second * sine
        to = query + (token * num_heads + head) * head_dim
        if head >= num_heads:
            to = keys + (slot * num_kv_heads + head - num_heads) * head_dim
        tl.store(to + column, rotated, mask=inside)


@triton.jit
def _gate(joined, result, width, tile: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = column < width
    gate = tl.load(joined + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _round_rows(rows, rounded, scales, width, tile: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64) * width, tl.arange(0, tile)
    largest = tl.zeros([tile], tl.float32)
    for begin in range(0, width, tile):
        inside = begin + column < width
        value = tl.load(rows + row + begin + column, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(value.to(tl.float32)))
    # torchao's scale is of the rows' type first.
    scale = (tl.max(largest, axis=0) / 448.0).to(rows.dtype.element_ty).to(tl.float32)
    tl.store(scales + tl.program_id(0), scale)
    divisor = tl.where(scale == 0, 1.0, scale)
    for begin in range(0, width, tile):
        inside = begin + column < width
        value = tl.load(rows + row + begin + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.clamp(tl.div_rn(value, divisor), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(rounded + row + begin + column, value.to(tl.float8e4nv), mask=inside)


def norm(hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of rows that are contiguous."""
    num_rows, width = hidden_TD.shape
    normed_TD = torch.empty_like(hidden_TD)
    _norm[(num_rows,)](
        hidden_TD, weight_D, normed_TD, width, eps, block=triton.next_power_of_2(width), num_warps=NORM_WARPS
    )
    return normed_TD


def rotate_and_write(
    joined_TX: Tensor,
    rotation: tuple[Tensor, Tensor],
    positions_T: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    slots_T: Tensor,
    layer: tuple[Tensor, Tensor],
) -> Tensor:
    """Return [T, H, D] rotated queries; keys and values are written to their slots.

    joined_TX: heads of q, then k, then v; rotation: cosines and sines of all positions [P, D], the
    sines of the first half negated; norms: RMS norm weights of q and k; layer: (keys, values)
    [slots, H_kv, D] of the layer.
    """
    keys, values = layer
    num_kv_heads, head_dim = keys.shape[1:]
    num_tokens = len(joined_TX)
    num_heads = joined_TX.shape[1] // head_dim - 2 * num_kv_heads
    query_THD = joined_TX.new_empty((num_tokens, num_heads, head_dim))
    query_norm, key_norm = norms if norms is not None else (joined_TX, joined_TX)
    _rotate_and_write[(num_tokens, num_heads + 2 * num_kv_heads)](
        joined_TX, *rotation, positions_T, query_norm, key_norm, slots_T, query_THD, keys, values,
        len(rotation[0]), num_heads, num_kv_heads, eps,
        head_dim=head_dim, block=triton.next_power_of_2(head_dim), has_norm=norms is not None, num_warps=HEAD_WARPS,
    )  # fmt: skip
    return query_THD


def gate(joined_TX: Tensor) -> Tensor:
    """Return [T, M] silu(gate) * up of [T, 2 M]."""
    num_rows, width = joined_TX.shape[0], joined_TX.shape[1] // 2
    result_TM = joined_TX.new_empty((num_rows, width))
    _gate[(num_rows, triton.cdiv(width, _GATE_TILE))](joined_TX, result_TM, width, tile=_GATE_TILE)
    return result_TM


def round_rows(rows_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in fp8 and scales [T, 1]; a row's largest number becomes fp8's largest."""
    num_rows, width = rows_TK.shape
    rounded_TK = torch.empty_like(rows_TK, dtype=torch.float8_e4m3fn)
    scales_T1 = torch.empty((num_rows, 1), dtype=torch.float32, device=rows_TK.device)
    tile = min(_ROUNDED_TILE, triton.next_power_of_2(width))
    _round_rows[(num_rows,)](rows_TK, rounded_TK, scales_T1, width, tile=tile, num_warps=8)
    return rounded_TK, scales_T1
