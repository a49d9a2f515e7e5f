"""A product of few rows in Triton that computes the RMS norm before it, and the gate behind it, in the same kernel.

A pass over few tokens is bound by reading weights and by the number of its kernels. Here a program reads a tile of the
weight once, for all rows, and the rows beside it: it multiplies them with the norm's weight, sums their squares, and
divides by the root of their mean at the end, which is the norm because a row's divisor is the same for all columns. A
gated product computes a column of the gate and of `up` in the same program.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests). `fused_layer.py` decides where; the norm, the
product and the gate apart are the oracle. Not for float16, whose range a row before its division may exceed.
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.execution.triton_attention import product

_LEAST_ROWS = 16
_TILE_BYTES = 8192
"""Of a tile of the weight: several of them at once fit the memory that a program may share, on small devices too."""


@triton.jit
def _weights(weight, column, is_column, at, inside, width):
    """[width's part, columns] a tile of the weight [columns, width], transposed."""
    mask = inside[:, None] & is_column[None, :]
    return tl.load(weight + column[None, :].to(tl.int64) * width + at[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=("num_rows",))
def _norm_product(
    hidden, norm, weight, bias, result, num_rows, width, num_columns, eps,
    rows: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr,
    gated: tl.constexpr, has_bias: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, rows), tl.program_id(0) * tile + tl.arange(0, tile)
    is_row, is_column = row < num_rows, column < num_columns
    squares = tl.zeros([rows], tl.float32)
    sums, ups = tl.zeros([rows, tile], tl.float32), tl.zeros([rows, tile], tl.float32)
    for begin in range(0, width, depth):
        at = begin + tl.arange(0, depth)
        inside = at < width
        values = tl.load(
            hidden + row[:, None] * width + at[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        squares += tl.sum(values * values, axis=1)
        factor = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        scaled = (values * factor[None, :]).to(weight.dtype.element_ty)
        sums += product(scaled, _weights(weight, column, is_column, at, inside, width), upcast)
        if gated:
            ups += product(scaled, _weights(weight, column + num_columns, is_column, at, inside, width), upcast)
    scale = tl.rsqrt(squares / width + eps)[:, None]
    sums *= scale
    if has_bias:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if gated:
        sums *= tl.sigmoid(sums) * ups * scale
    tl.store(result + row[:, None] * num_columns + column[None, :], sums, mask=is_row[:, None] & is_column[None, :])


def rows_of(num_rows: int) -> int:
    """Rows of a kernel that computes so many: a power of two, as each number is compiled anew."""
    rows: int = max(_LEAST_ROWS, triton.next_power_of_2(num_rows))
    return rows


def norm_product(
    hidden_TD: Tensor, norm_D: Tensor, eps: float, weight_ND: Tensor, bias_N: Tensor | None, gated: bool, tile: int
) -> Tensor:
    """The product of the rows' RMS norm with a weight: [T, N], or of a gated one silu(first half) * second half.

    hidden_TD: few rows that follow each other in memory (kernels are tried for up to 64); bias_N: of a product that is
    not gated; tile: columns of a program, a power of two from 16 on.
    """
    num_rows, width = hidden_TD.shape
    num_columns = len(weight_ND) // 2 if gated else len(weight_ND)
    result = hidden_TD.new_empty((num_rows, num_columns))
    _norm_product[(triton.cdiv(num_columns, tile),)](
        hidden_TD, norm_D, weight_ND, norm_D if bias_N is None else bias_N, result, num_rows, width, num_columns, eps,
        rows=rows_of(num_rows), tile=tile, depth=_TILE_BYTES // hidden_TD.element_size() // tile,
        gated=gated, has_bias=bias_N is not None,
        # The interpreter has no bfloat16 products.
        upcast=hidden_TD.dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1",
    )  # fmt: skip
    return result
