"""Traversal verification (Weng et al., NeurIPS 2025): trees from leaves to root.

For trees whose children are drawn without replacement, and for i.i.d. chains with equal prefixes
merged (the distinct tokens of i.i.d. draws, in order of first appearance, are draws without
replacement). W(root) = 1, W(vx) = min(1, W(v) p(x|v)/q(x|v)). Repeat: take the first leaf u in
depth-first order; accept the path to u with probability W(u) (the root always) and draw the next
token from p(.|u); else delete u = vx and, with r = (W(v) p(.|v) - q(.|v))+ and S = sum r, set
  W(v) = S/(S + 1 - W(v)) (the root keeps 1),  p(.|v) = r/S,  q(.|v) = norm (q(.|v) without x).
With one chain this is block verification. Laws change within the block only; later steps are as
before. Sequential: a step per node, and the rows of the current path are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_block import chain_table
from engine.speculation.verification.node import normalised


@dataclass(frozen=True)
class Stops:
    """Position of the walk in every tree: a leaf of the remaining tree, which may be accepted."""

    leaf_B: Tensor
    """Whether it is at a leaf, or at a root with nothing left below."""
    rank_B: Tensor
    """First chain through the node, within its request."""
    depth_B: Tensor
    weight_B: Tensor
    probs_BV: Tensor
    """Law of the next token after acceptance."""


def leaders(tokens_BKL: Tensor, length_BK: Tensor) -> Tensor:
    """Return [B, K, L] first chain with the same d + 1 tokens; ended ones lead themselves."""
    num_chains, length = tokens_BKL.shape[1:]
    within_BKL = torch.arange(length, device=tokens_BKL.device) < length_BK.unsqueeze(2)
    equal_BKKL = tokens_BKL.unsqueeze(2) == tokens_BKL.unsqueeze(1)
    equal_BKKL = equal_BKKL & within_BKL.unsqueeze(2) & within_BKL.unsqueeze(1)
    same_BKKL = equal_BKKL.cumprod(-1).bool()
    self_KK1 = torch.eye(num_chains, dtype=torch.bool, device=tokens_BKL.device).unsqueeze(-1)
    return (same_BKKL | self_KK1).int().argmax(2)


def traverse(chains: Chains, target: ProbsTable, accept: Callable[[Stops], Tensor]) -> Stops:
    """Walk all trees at once until a leaf of each is accepted; roots always are.

    accept: decides [B] at every stop, by random numbers or by enumeration.
    """
    chain_BK, exists_BK = chain_table(chains)
    length_BK = torch.where(exists_BK, chains.length_C[chain_BK], 0)
    tokens_BKL = chains.tokens_CL[chain_BK]
    leader_BKL = leaders(tokens_BKL, length_BK)
    each_B, rank_K = (torch.arange(n, device=chain_BK.device) for n in chain_BK.shape)
    length = chains.max_length
    rank_B, depth_B = torch.zeros_like(each_B), torch.zeros_like(each_B)
    weight_BX = torch.ones((len(each_B), length + 1), dtype=torch.float64, device=each_B.device)
    vocab_size, dtype = target.probs_NV.shape[1], target.probs_NV.dtype
    p_BXV = torch.zeros((len(each_B), length + 1, vocab_size), dtype=dtype, device=each_B.device)
    q_BXV = torch.zeros_like(p_BXV)
    p_BXV[:, 0] = target.select(chain_BK[:, 0]).rows_at(0)
    q_BXV[:, 0] = chains.draft.select(chain_BK[:, 0]).rows_at(0)
    deleted_BKL = torch.zeros_like(leader_BKL, dtype=torch.bool)
    running_B = torch.ones_like(each_B, dtype=torch.bool)
    while bool(running_B.any()):
        child_BK = _children(rank_B, depth_B, leader_BKL, length_BK, rank_K)
        child_BK &= ~deleted_BKL[each_B, :, depth_B.clamp(max=length - 1)]
        has_child_B = child_BK.any(1)
        stops = Stops(running_B & ~has_child_B, rank_B, depth_B, weight_BX[each_B, depth_B], p_BXV[each_B, depth_B])
        taken_B = stops.leaf_B & ((depth_B == 0) | accept(stops))
        running_B = running_B & ~taken_B
        descends_B, deletes_B = running_B & has_child_B, stops.leaf_B & ~taken_B
        # Return to the parent of a deleted leaf, whose law loses the leaf's mass.
        parent_B = (depth_B - 1).clamp(min=0)
        token_B = tokens_BKL[each_B, rank_B, parent_B]
        rows = each_B[deletes_B]
        deleted_BKL[rows, rank_B[rows], parent_B[rows]] = True
        _delete(p_BXV, q_BXV, weight_BX, rows, parent_B[rows], token_B[rows])
        above_B = torch.where(parent_B > 0, leader_BKL[each_B, rank_B, (parent_B - 1).clamp(min=0)], 0)
        # Descend to the first remaining child.
        first_B = child_BK.int().argmax(1)
        rows = each_B[descends_B]
        _descend(chains, target, p_BXV, q_BXV, weight_BX, rows, depth_B[rows], chain_BK[rows, first_B[rows]])
        rank_B = torch.where(deletes_B, above_B, torch.where(descends_B, first_B, rank_B))
        depth_B = depth_B + descends_B.long() - deletes_B.long()
    return Stops(running_B, rank_B, depth_B, weight_BX[each_B, depth_B], p_BXV[each_B, depth_B])


def _children(rank_B: Tensor, depth_B: Tensor, leader_BKL: Tensor, length_BK: Tensor, rank_K: Tensor) -> Tensor:
    """Return [B, K] the chains that lead a child of the node that `rank_B` leads at `depth_B`."""
    each_B = torch.arange(len(rank_B), device=rank_B.device)
    here_BK = leader_BKL[each_B, :, (depth_B - 1).clamp(min=0)] == rank_B.unsqueeze(1)
    leads_BK = leader_BKL[each_B, :, depth_B.clamp(max=leader_BKL.shape[2] - 1)] == rank_K
    return (here_BK | (depth_B == 0).unsqueeze(1)) & leads_BK & (length_BK > depth_B.unsqueeze(1))


def _delete(p_BXV: Tensor, q_BXV: Tensor, weight_BX: Tensor, rows: Tensor, depth: Tensor, token: Tensor) -> None:
    """Remove a rejected child from its parent's laws and weight; `rows` selects requests."""
    weight, p_NV, q_NV = weight_BX[rows, depth], p_BXV[rows, depth], q_BXV[rows, depth]
    surplus_NV = (weight.unsqueeze(1).to(p_NV.dtype) * p_NV - q_NV).clamp_(min=0)
    total = surplus_NV.sum(1, dtype=torch.float64)
    left = total + 1 - weight
    updated = torch.where(left > 0, total / torch.where(left > 0, left, 1.0), 1.0)
    weight_BX[rows, depth] = torch.where(depth > 0, updated, 1.0)
    p_BXV[rows, depth] = normalised(surplus_NV, p_NV)
    without_NV = q_NV.scatter(1, token.unsqueeze(1), 0.0)
    q_BXV[rows, depth] = normalised(without_NV, torch.zeros_like(without_NV))


def _descend(
    chains: Chains,
    target: ProbsTable,
    p_BXV: Tensor,
    q_BXV: Tensor,
    weight_BX: Tensor,
    rows: Tensor,
    depth: Tensor,
    chain: Tensor,
) -> None:
    """Step to the child that `chain` leads; its weight comes from the laws above."""
    token = chains.tokens_CL[chain, depth]
    p_x, q_x = p_BXV[rows, depth, token].double(), q_BXV[rows, depth, token].double()
    ratio = torch.where(q_x > 0, p_x / torch.where(q_x > 0, q_x, 1.0), 0.0)
    weight_BX[rows, depth + 1] = (weight_BX[rows, depth] * ratio).clamp(max=1.0)
    p_BXV[rows, depth + 1] = target.select(chain).rows(depth + 1)
    q_BXV[rows, depth + 1] = chains.draft.select(chain).rows((depth + 1).clamp(max=chains.max_length - 1))


def verify_traversal(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """Accept the first leaf whose uniform number falls below its weight."""
    chain_BK, _ = chain_table(chains)
    each_B = torch.arange(len(chain_BK), device=chain_BK.device)

    def falls_below(stops: Stops) -> Tensor:
        uniform_B = noise.accept_CL[chain_BK[each_B, stops.rank_B], (stops.depth_B - 1).clamp(min=0)]
        return uniform_B < stops.weight_B

    stops = traverse(chains, target, falls_below)
    winner_B = chain_BK[each_B, stops.rank_B]
    return ChainVerdict(winner_B, stops.depth_B, categorical(stops.probs_BV, noise.residual_C[winner_B]))
