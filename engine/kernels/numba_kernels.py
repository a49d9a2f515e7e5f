"""Kernels of a CPU, compiled by Numba."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import numba_block, numba_rows
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, Filters, Floats, Ints, ProbsTable
from engine.kernels.torch_kernels import TorchKernels


def _is_taken(rows_NV: Tensor) -> bool:
    """Whether the kernels support these rows."""
    return rows_NV.dtype == torch.float32 and rows_NV.is_contiguous()


class NumbaKernels(TorchKernels):
    """Implements `Kernels`."""

    def distribution(
        self, logits_NV: Tensor, temperature_N: Tensor, filters: Filters, probs_NV: Tensor | None = None
    ) -> Tensor:
        if _is_taken(logits_NV):
            return numba_rows.distribution(logits_NV, temperature_N, filters, probs_NV)
        return super().distribution(logits_NV, temperature_N, filters, probs_NV)

    def draw(self, probs_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
        if _is_taken(probs_NV):
            return numba_rows.draw(probs_NV, row_C, uniform_C)
        return super().draw(probs_NV, row_C, uniform_C)

    def race(self, chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
        if chains.shape is not None and chains.max_length and _is_taken(target.probs_NV):
            return numba_block.race(chains, target, noise)
        return super().race(chains, target, noise)

    def takes_logits(self, logits_NV: Tensor) -> bool:
        return _is_taken(logits_NV)

    def decide(
        self,
        logits_NV: Tensor,
        temperature_B: Tensor,
        filters: Filters,
        starts: Ints,
        chains: Chains,
        node_CX: Tensor,
        numbers: Tensor,
    ) -> tuple[Ints, Floats]:
        return numba_block.decide(logits_NV, temperature_B, filters, starts, chains, node_CX, numbers)
