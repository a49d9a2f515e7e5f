"""Products of linear layers, for weights in several layouts, in few calls.

Plain weights, and fp8 weights of torchao with a scale for each row, are joined: q, k and v are
one product, gate and up another. The modules keep views, so nothing is stored twice. Other
layouts of torchao, and the layers of compressed-tensors, are computed by their modules, and
the results are joined.

If Triton's kernels compute the layers (`use_kernels`), a single kernel rounds rows to fp8: torchao
takes eight operations. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.cuda.layer_check import use_float8
from engine.models.quantising import dequantised, has_float8_rows, is_plain, rounds_rows, rounds_to_float8


class RowProduct:
    """`rows @ weight.T + bias` for rows [T, K]."""

    def __call__(self, rows_TK: Tensor) -> Tensor:
        raise NotImplementedError

    def add_to(self, sums_TN: Tensor, rows_TK: Tensor) -> None:
        sums_TN += self(rows_TK)


@dataclass(frozen=True)
class PlainProduct(RowProduct):
    weight_NK: Tensor
    bias_N: Tensor | None = None

    def __call__(self, rows_TK: Tensor) -> Tensor:
        return linear(rows_TK, self.weight_NK, self.bias_N)

    def add_to(self, sums_TN: Tensor, rows_TK: Tensor) -> None:
        sums_TN.addmm_(rows_TK, self.weight_NK.t())
        if self.bias_N is not None:
            sums_TN += self.bias_N


@dataclass(frozen=True)
class ModuleProduct(RowProduct):
    modules: Sequence[nn.Module]

    def __call__(self, rows_TK: Tensor) -> Tensor:
        parts: list[Tensor] = [module(rows_TK) for module in self.modules]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, -1)


@dataclass(frozen=True)
class Float8Product(RowProduct):
    """A product with a weight of torchao that has a scale for each row of the weight."""

    weight_NK: Any
    bias_N: Tensor | None
    module: nn.Module
    """A module whose weight is a part of it; the probe disables its rounding."""
    by_kernel: bool

    def __call__(self, rows_TK: Tensor) -> Tensor:
        if not rounds_rows(self.module):
            return linear(rows_TK, dequantised(self.weight_NK), self.bias_N)
        if not self.by_kernel:
            return linear(rows_TK, self.weight_NK, self.bias_N)
        # Triton is installed if its kernels are used.
        from engine.cuda.layer_kernels import round_rows

        rounded_TK, scales_T1 = round_rows(rows_TK)
        return torch._scaled_mm(
            rounded_TK,
            self.weight_NK.qdata.t(),
            scales_T1,
            self.weight_NK.scale.t(),
            self.bias_N,
            out_dtype=rows_TK.dtype,
            use_fast_accum=self.weight_NK.mm_config.use_fast_accum,
        )


def product(modules: Sequence[Any], use_kernels: bool = False) -> RowProduct:
    """Return the product of modules with stacked weights, of which they keep views.

    use_kernels: whether Triton's kernels compute the layers.
    """
    biases = [module.bias for module in modules if module.bias is not None]
    if biases and len(biases) < len(modules):
        return ModuleProduct(modules)
    bias = None
    if biases:
        bias = biases[0] if len(biases) == 1 else torch.cat(biases)
    if all(map(is_plain, modules)):
        return PlainProduct(_joined(modules), bias)
    if all(has_float8_rows(module) for module in modules):
        weight = modules[0].weight
        rounds = rounds_to_float8(weight)
        by_kernel = use_kernels and rounds and use_float8(weight.device, weight.dtype)
        return Float8Product(_joined(modules), bias, modules[0], by_kernel)
    return ModuleProduct(modules)


def _joined(modules: Sequence[Any]) -> Any:
    if len(modules) == 1:
        return modules[0].weight.detach()
    weight = torch.cat([module.weight.detach() for module in modules])
    start = 0
    for module in modules:
        stop = start + module.weight.shape[0]
        module.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        start = stop
    return weight
