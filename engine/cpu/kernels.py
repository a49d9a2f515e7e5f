"""Kernels of a CPU, compiled by Numba (`row_loops.py`, `block_loops.py`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.cpu.compiled import block_loops, random_numbers, recurrence_loops, row_loops
from engine.cpu.compiled.row_loops import arrays_of
from engine.kernels.protocol import (
    ChainNoise,
    Chains,
    ChainVerdict,
    Filters,
    Floats,
    Ints,
    ProbsTable,
    RecurrentSteps,
    TextNodes,
)
from engine.kernels.torch_kernels import Kernels


def takes(rows_NV: Tensor) -> bool:
    """Return whether compiled operations support these rows' numbers."""
    return rows_NV.dtype == torch.float32 and rows_NV.is_contiguous()


class NumbaKernels(Kernels):
    """Compiled operations. They check no bounds, so shapes are checked here."""

    decides = True

    def distribution(
        self, logits_NV: Tensor, temperature_N: Tensor, filters: Filters, probs_NV: Tensor | None = None
    ) -> Tensor:
        if not takes(logits_NV):
            return super().distribution(logits_NV, temperature_N, filters, probs_NV)
        if probs_NV is None:
            probs_NV = torch.empty_like(logits_NV)
        parameters = temperature_N.contiguous().numpy(), *arrays_of(filters, len(logits_NV))
        assert {*map(len, parameters)} == {len(logits_NV)}, "parameters of each row"
        assert probs_NV.shape == logits_NV.shape, "one distribution for each row"
        row_loops.distributions(logits_NV.numpy(), *parameters, probs_NV.numpy())
        return probs_NV

    def draw(self, probs_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
        if not takes(probs_NV):
            return super().draw(probs_NV, row_C, uniform_C)
        token_C = torch.empty_like(row_C)
        row_loops.draw(probs_NV.numpy(), row_C.contiguous().numpy(), uniform_C.contiguous().numpy(), token_C.numpy())
        return token_C

    def race(self, chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
        if not (chains.max_length and takes(target.probs_NV)):
            return super().race(chains, target, noise)
        verdict_3B = torch.empty((3, chains.shape[0]), dtype=torch.int64, device=chains.length_C.device)
        tensors = [
            chains.tokens_CL, chains.length_C, chains.request_C,
            target.probs_NV, target.row_CX, chains.draft.probs_NV, chains.draft.row_CX,
            noise.accept_CL, noise.residual_C, noise.score_C,
        ]  # fmt: skip
        arrays = [tensor.contiguous().numpy() for tensor in tensors]
        count = block_loops.race(*arrays, verdict_3B.numpy())
        assert count == chains.shape[0], "the chains are not of as many requests as their shape says"
        return ChainVerdict(*verdict_3B)

    def recur(
        self,
        inputs_SW: Tensor,
        query_TGK: Tensor,
        scale_HX: Tensor,
        has_beta: bool,
        states_PHKV: Tensor,
        steps: RecurrentSteps,
    ) -> Tensor:
        output_THV = states_PHKV.new_empty(len(query_TGK), states_PHKV.shape[1], states_PHKV.shape[3])
        recurrence_loops.recur(
            inputs_SW.numpy(),
            query_TGK.contiguous().numpy(),
            scale_HX.contiguous().numpy(),
            has_beta,
            states_PHKV.numpy(),
            steps.steps,
            steps.begins,
            steps.first_states,
            output_THV.numpy(),
        )
        return output_THV

    def uniform(self, seed_C: Ints, position_C: Ints, purpose_P: Ints, rank_C: Ints, length: int) -> Floats:
        return random_numbers.uniform(seed_C, position_C, purpose_P, rank_C, length)

    def decide(
        self,
        logits_NV: Tensor,
        temperature_B: Tensor,
        filters: Filters,
        starts: Ints,
        chains: Chains,
        node_CX: Tensor,
        numbers: Tensor,
        texts: TextNodes | None = None,
    ) -> tuple[Ints, Floats]:
        num_nodes, num_requests = len(logits_NV), len(temperature_B)
        draft = chains.draft
        texts = texts or TextNodes.none(num_nodes, num_requests)
        assert starts[-1] == num_nodes, "each row of logits is a node's"
        assert len(texts.parent_N) == len(texts.token_N) == num_nodes, "a parent and a token of each node"
        assert len(texts.number_BL) == num_requests, "numbers of each request"
        verdict_4B = np.empty((4, num_requests), np.int64)
        largest_N = np.empty(num_nodes + len(draft.probs_NV))
        block_loops.decide(
            logits_NV.numpy(), temperature_B.numpy(), *arrays_of(filters, num_requests), starts,
            chains.tokens_CL.numpy(), chains.length_C.numpy(), chains.request_C.numpy(), node_CX.numpy(),
            draft.probs_NV.numpy(), draft.row_CX.numpy(), numbers.numpy(),
            texts.parent_N, texts.token_N, texts.number_BL, verdict_4B, largest_N,
        )  # fmt: skip
        return verdict_4B, largest_N
