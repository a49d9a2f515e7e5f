"""Kernels of a CUDA device, compiled by Triton, or in its interpreter on a CPU (tests)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cpu.compiled import random_numbers
from engine.cuda import block_kernels, move_kernel, nucleus_kernels, recurrence_kernels, row_kernels
from engine.cuda.row_kernels import Subtracted
from engine.kernels.protocol import (
    ChainNoise,
    Chains,
    ChainVerdict,
    Filters,
    Floats,
    Ints,
    KVMoves,
    ProbsTable,
    RecurrentSteps,
)
from engine.kernels.torch_kernels import Kernels

_USUAL_MOVES = 32
"""Usual most moves of a sequence, to which they are padded for one compiled kernel."""


class TritonKernels(Kernels):
    by_tiles = reads_no_filter = True

    def softmax(self, logits_NV: Tensor, temperature_N: Tensor, probs_NV: Tensor | None = None) -> Tensor:
        return row_kernels.softmax(logits_NV, temperature_N, probs_NV)

    def truncated(self, logits_NV: Tensor, temperature_N: Tensor, filters: Filters) -> Tensor:
        return nucleus_kernels.truncated(logits_NV, temperature_N, filters)

    def draw(self, probs_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
        if probs_NV.is_contiguous():
            return row_kernels.draw(probs_NV, row_C, uniform_C)
        return super().draw(probs_NV, row_C, uniform_C)

    def nucleus(self, probs_NV: Tensor, top_p_N: Tensor) -> Tensor:
        return nucleus_kernels.nucleus(probs_NV, top_p_N)

    def draw_residual(
        self, chains: Chains, target: ProbsTable, accepted_C: Tensor, weight_C: Tensor, uniform_C: Tensor
    ) -> Tensor:
        row_C = target.row_CX.gather(1, accepted_C.unsqueeze(1)).squeeze(1)
        if chains.max_length == 0:
            return row_kernels.draw(target.probs_NV, row_C, uniform_C)
        within_C1 = accepted_C.clamp(max=chains.max_length - 1).unsqueeze(1)
        draft_row_C = chains.draft.row_CX.gather(1, within_C1).squeeze(1)
        less = Subtracted(chains.draft.probs_NV, draft_row_C, weight_C, accepted_C < chains.length_C)
        return row_kernels.draw(target.probs_NV, row_C, uniform_C, less)

    def race(self, chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
        if chains.max_length:
            return block_kernels.race(chains, target, noise)
        return super().race(chains, target, noise)

    def winners(self, chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
        return block_kernels.winners(chains, score_C, accepted_C, next_token_C)

    def uniform(self, seed_C: Ints, position_C: Ints, purpose_P: Ints, rank_C: Ints, length: int) -> Floats:
        # The numbers are made on the host.
        return random_numbers.uniform(seed_C, position_C, purpose_P, rank_C, length)

    def recur(
        self,
        inputs_SW: Tensor,
        query_TGK: Tensor,
        scale_HX: Tensor,
        has_beta: bool,
        states_PHKV: Tensor,
        steps: RecurrentSteps,
    ) -> Tensor:
        return recurrence_kernels.recur(inputs_SW, query_TGK, scale_HX, has_beta, states_PHKV, steps)

    def move(self, storages: Sequence[Tensor], moves: Sequence[KVMoves]) -> None:
        move_SM2 = torch.from_numpy(_padded(moves)).to(storages[0].device, non_blocking=True)
        for storage in storages:
            move_kernel.keep(storage, move_SM2)


def _padded(moves: Sequence[KVMoves]) -> npt.NDArray[np.int64]:
    """Return [sequences, most, 2], padded with -1."""
    most = max(_USUAL_MOVES, 1 << (max(map(len, moves)) - 1).bit_length())
    result = np.full((len(moves), most, 2), -1)
    for sequence_moves, row in zip(moves, result, strict=True):
        row[: len(sequence_moves)] = sequence_moves
    return result
