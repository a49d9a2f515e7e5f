"""Operations with several implementations: the specification in plain torch, for any device.

`cpu/kernels.py` (CPU) and `cuda/kernels.py` (CUDA) override operations by compiled kernels, and use
the plain operations for unsupported inputs. `start/choosing.py` chooses once, when the engine is
built, and compares every compiled operation with the plain operation.

To add an operation: a method of `Kernels`, inputs for it in `choosing.py`, and compiled kernels.
Not for: the passes of the models (`engine.models`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine import noise
from engine.kernels import torch_block
from engine.kernels.draw import categorical
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
    TextNodes,
)

# Number of largest probabilities among which top-p first searches for its edge.
_TOP_P_WINDOW = 1024


class Kernels:
    """Operations over rows of the vocabulary, over drafted chains, and over K/V."""

    decides = False
    """Whether `decide` is one compiled call, also for text drafts; else no step calls it."""
    by_tiles = False
    """Whether operations work on tiles of a row.

    `token`, `block` and `bv_race` then store a sum for each tile, not whole rows.
    """
    reads_no_filter = False
    """Whether filters sort no row and read no number on the host, so CUDA graphs record them."""

    def softmax(self, logits_NV: Tensor, temperature_N: Tensor, probs_NV: Tensor | None = None) -> Tensor:
        """Return [N, V] float32 distributions at positive temperatures.

        probs_NV (contiguous): the output, if given.
        """
        return torch.softmax(_scaled(logits_NV, temperature_N), -1, out=probs_NV)

    def truncated(self, logits_NV: Tensor, temperature_N: Tensor, filters: Filters) -> Tensor:
        """Return [N, V] float32 distributions after min-p and top-k, with ties at their edges.

        min-p drops tokens below this share of the most likely token's probability, at the
        temperature; 0 keeps all. top-k keeps the k most likely tokens; 0 keeps all. None: no row
        asks for the filter.
        """
        min_p_N, top_k_N, _, most_k = filters
        scaled_NV = _scaled(logits_NV, temperature_N)
        if min_p_N is not None:
            edge_N1 = min_p_N.log().unsqueeze(-1)
            scaled_NV = scaled_NV.masked_fill(scaled_NV < edge_N1, -torch.inf)
        if top_k_N is not None:
            num_tokens = scaled_NV.shape[-1]
            wanted_N = torch.where(top_k_N > 0, top_k_N, num_tokens).clamp(max=num_tokens)
            widest = min(most_k, num_tokens)
            largest_NK = scaled_NV.topk(widest, dim=-1).values
            edge_N1 = largest_NK.gather(-1, (wanted_N.clamp(max=widest) - 1).unsqueeze(-1))
            edge_N1 = edge_N1.masked_fill((wanted_N >= num_tokens).unsqueeze(-1), -torch.inf)
            scaled_NV = scaled_NV.masked_fill(scaled_NV < edge_N1, -torch.inf)
        return scaled_NV.softmax(-1)

    def distribution(
        self,
        logits_NV: Tensor,
        temperature_N: Tensor,
        filters: Filters,
        probs_NV: Tensor | None = None,
    ) -> Tensor:
        """Return [N, V] float32 distributions after min-p, top-k and top-p, in this order.

        Temperatures are positive. Filters keep ties at their edges. probs_NV (contiguous) may be
        used as the output, if given.
        """
        if filters.min_p_N is None and filters.top_k_N is None:
            filtered_NV = self.softmax(logits_NV, temperature_N, probs_NV)
        else:
            filtered_NV = self.truncated(logits_NV, temperature_N, filters)
        if filters.top_p_N is None:
            return filtered_NV
        return self.nucleus(filtered_NV, filters.top_p_N)

    def draw(self, probs_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
        """Return [C] a token from each of the rows, by the inverse of the cumulative sum."""
        return categorical(probs_NV[row_C], uniform_C)

    def nucleus(self, probs_NV: Tensor, top_p_N: Tensor) -> Tensor:
        """Return [N, V] the smallest sets of most likely tokens with mass >= top_p, normalised.

        Ties at the edge are kept. A row with top_p of 1 or more is unchanged.
        """
        num_tokens = probs_NV.shape[-1]
        window = min(_TOP_P_WINDOW, num_tokens)
        largest_NW = probs_NV.topk(window, dim=-1).values
        active_N = top_p_N < 1
        reached_N = largest_NW.sum(-1, dtype=torch.float64) >= top_p_N
        if window < num_tokens and not bool((reached_N | ~active_N).all()):
            largest_NW = probs_NV.sort(dim=-1, descending=True).values
        before_NW = largest_NW.cumsum(-1, dtype=torch.float64) - largest_NW
        # The edge is the last token whose predecessors have less than top_p.
        num_kept_N = (before_NW < top_p_N.unsqueeze(-1)).sum(-1).clamp(min=1)
        edge_N1 = largest_NW.gather(-1, (num_kept_N - 1).unsqueeze(-1))
        kept_NV = probs_NV.masked_fill(probs_NV < edge_N1, 0.0)
        kept_mass_N1 = kept_NV.sum(-1, keepdim=True)
        return torch.where(active_N.unsqueeze(-1), kept_NV / kept_mass_N1, probs_NV)

    def draw_residual(
        self,
        chains: Chains,
        target: ProbsTable,
        accepted_C: Tensor,
        weight_C: Tensor,
        uniform_C: Tensor,
    ) -> Tensor:
        """Return [C] the token after the first `accepted_C` tokens of each chain.

        It is drawn from the residual, the surplus (weight * target - draft)+. After a whole chain,
        and without surplus, it is drawn from the target.
        """
        residual_CV = torch_block.residual(chains, target, accepted_C, weight_C)
        return categorical(residual_CV, uniform_C)

    def race(self, chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
        """Verify every chain by block verification, and race the chains of each request."""
        return torch_block.race(chains, target, noise)

    def winners(self, chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
        """Return each request's chain with the smallest score (ties: the first)."""
        return torch_block.winners(chains, score_C, accepted_C, next_token_C)

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
        """Decide a step; return ([4, B] verdict, [N + M] largest numbers), on the host.

        The verdict of each request: chain, accepted length, next token, and end of the walk. It is
        the verdict of `race` on `distribution` of the logits; at temperature 0 the longest match
        with the most likely tokens. The largest numbers show non-finite rows: the largest logit of
        each of N nodes, then a probability of each of M draft distributions. They are NaN if a
        logit was, and non-finite if a number of the model was.

        filters: of the B requests. starts: [B + 1] first row of each request's nodes, then N.
        node_CX: the node below the first i tokens of each chain. numbers: [6, C, L], the result of
        `engine.drafting.numbers.draw_numbers`. texts: nodes of text drafts, if it `decides`. They
        are verified first. The end of the walk through them is counted from the request's root.
        """
        assert texts is None, "these kernels verify no text drafts"
        counts_B = torch.from_numpy(np.diff(starts)).to(logits_NV.device)
        positive_B = torch.where(temperature_B > 0, temperature_B, 1.0)
        filters_N = filters.each(lambda filter_B: filter_B.repeat_interleave(counts_B))
        probs_NV = self.distribution(logits_NV, positive_B.repeat_interleave(counts_B), filters_N)
        noise = ChainNoise.of(numbers, chains.max_length)
        drawn = torch_block.race(chains, ProbsTable(probs_NV, node_CX, self), noise)
        accepted_C, token_C = torch_block.longest_match(chains, logits_NV.argmax(1)[node_CX])
        matched = torch_block.winners(chains, -accepted_C.double(), accepted_C, token_C)
        drawn_3B = torch.stack([drawn.chain_B, drawn.accepted_B, drawn.next_token_B])
        matched_3B = torch.stack([matched.chain_B, matched.accepted_B, matched.next_token_B])
        largest = torch.cat([logits_NV.amax(1), chains.draft.probs_NV[:, 0]])
        verdict_3B = torch.where(temperature_B > 0, drawn_3B, matched_3B)
        ends_B = torch.zeros_like(verdict_3B[:1])
        verdict_4B = torch.cat([verdict_3B, ends_B])
        return verdict_4B.cpu().numpy(), largest.double().cpu().numpy()

    def uniform(self, seed_C: Ints, position_C: Ints, purpose_P: Ints, rank_C: Ints, length: int) -> Floats:
        """Return [P, C, L] random numbers by purpose, chain and depth (`noise.py`), on the host."""
        purposes = purpose_P[:, None, None]
        depths = np.arange(length)
        return noise.uniform(seed_C[:, None], position_C[:, None], purposes, rank_C[:, None], depths)

    def recur(
        self,
        inputs_SW: Tensor,
        query_TGK: Tensor,
        scale_HX: Tensor,
        has_beta: bool,
        states_PHKV: Tensor,
        steps: RecurrentSteps,
    ) -> Tensor:
        """Return [T, H, V] outputs of a recurrence, and store states (`attention/recurrent.py`).

        inputs_SW: key, value, rate and beta of each token. A sequence may start from a state that
        an earlier one stores.
        """
        _, num_heads, key_dim, value_dim = states_PHKV.shape
        num_groups = query_TGK.shape[1]
        first_value = num_groups * key_dim
        ends = (first_value, first_value + num_heads * value_dim, inputs_SW.shape[1] - has_beta * num_heads)
        output_THV = states_PHKV.new_zeros(len(query_TGK), num_heads, value_dim)
        for number, first in enumerate(steps.first_states.tolist()):
            text = states_PHKV[first].clone() if first >= 0 else torch.zeros_like(states_PHKV[0])
            nodes = {-1: text}
            for token, source, node, row, *kept in steps.steps[:, slice(*steps.begins[number : number + 2])].T.tolist():
                key, value, rate, beta = inputs_SW[token].tensor_split(ends)
                key_HK1 = key.view(num_groups, -1).repeat_interleave(num_heads // num_groups, 0).unsqueeze(-1)
                state = nodes[source] * (scale_HX * rate.view(num_heads, -1)).exp().unsqueeze(-1)
                added_HV = value.view(num_heads, -1)
                if has_beta:
                    added_HV = beta[:, None] * (added_HV - (state * key_HK1).sum(1))
                state = state + key_HK1 * added_HV.unsqueeze(1)
                nodes[node] = state
                if row >= 0:
                    query_HK = query_TGK[row].repeat_interleave(num_heads // num_groups, 0)
                    output_THV[row] = (state * query_HK.unsqueeze(-1)).sum(1)
                for place in kept:
                    if place >= 0:
                        states_PHKV[place] = state
        return output_THV

    def move(self, storages: Sequence[Tensor], moves: Sequence[KVMoves]) -> None:
        """Move rows of contiguous [layers, slots, heads, dim] in place, by sequence.

        All rows of a sequence are read before any is written, and no two sequences share a slot.
        """
        pairs = torch.from_numpy(np.concatenate(moves)).to(storages[0].device, non_blocking=True)
        source, destination = pairs.unbind(1)
        for storage in storages:
            storage.index_copy_(1, destination, storage.index_select(1, source))


def _scaled(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Return float32 logits over temperature, with maximum 0 in each row.

    Subtracting the maximum first prevents an overflow at tiny temperatures.
    """
    logits_NV = logits_NV.to(torch.float32)
    return (logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature_N.unsqueeze(-1)


TORCH: Final = Kernels()
