"""Rules at one position, and their composition down the drafted chains.

A node rule takes the target law p, the draft law q and the drafted tokens at a node, and returns
the law of the emitted token given those drafts; it draws nothing. "Accepted" means that the
emitted token is one of the drafts. Composed top-down: draw the token at the root. If it is a
draft, every node with that token stays alive, and the walk continues below them with all their
children as drafts; otherwise it stops. For any draws, each emitted token has the target's law
given the tokens before it. So the composition is lossless for every lossless node rule, even if
the token came from a residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_block import chain_table
from engine.speculation.verification.rule import NodeRule


def normalised(mass_NV: Tensor, fallback_NV: Tensor) -> Tensor:
    """Scale rows to sum 1; rows without mass become the fallback's."""
    total_N1 = mass_NV.sum(-1, keepdim=True)
    return torch.where(total_N1 > 0, mass_NV / torch.where(total_N1 > 0, total_N1, 1.0), fallback_NV)


def at(rows_NV: Tensor, token_N: Tensor) -> Tensor:
    """Return [N] the entry of each row at its token."""
    return rows_NV.gather(1, token_N.unsqueeze(1)).squeeze(1)


def ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """Return [N] min(1, numerator / denominator), 0 where the denominator is 0."""
    safe_N = torch.where(denominator_N > 0, denominator_N, 1.0)
    return torch.where(denominator_N > 0, (numerator_N / safe_N).clamp(max=1.0), 0.0)


def point_mass(token_N: Tensor, weight_N: Tensor, vocab_size: int) -> Tensor:
    """Return [N, V] `weight_N` at each row's token."""
    rows_NV = weight_N.new_zeros((token_N.shape[0], vocab_size))
    return rows_NV.scatter_(1, token_N.unsqueeze(1), weight_N.unsqueeze(1))


def packed(drafted_NK: Tensor, present_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the present drafts moved to the front, in order.

    In a tree, the chains that lead a node's children are not contiguous.
    """
    order_NK = present_NK.int().argsort(dim=1, descending=True, stable=True)
    return drafted_NK.gather(1, order_NK), present_NK.gather(1, order_NK)


class TopDown:
    """A chain rule made of a node rule."""

    def __init__(self, node_rule: NodeRule) -> None:
        self.node_rule = node_rule

    def __call__(self, chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
        """Walk down all requests at once, level by level."""
        chain_BK, exists_BK = chain_table(chains)
        lead_B = chain_BK[:, 0]
        # Below its own last draft a request draws with its residual number, independently of the
        # lengths of other chains.
        residual_B1 = noise.residual_C[lead_B].unsqueeze(1)
        uniform_BL1 = torch.cat([noise.accept_CL[lead_B], residual_B1], 1)
        depth_L1 = torch.arange(chains.max_length + 1, device=lead_B.device)
        uniform_BL1 = torch.where(depth_L1 < chains.length_C[lead_B].unsqueeze(1), uniform_BL1, residual_B1)
        alive_BK, running_B = exists_BK, torch.ones_like(lead_B, dtype=torch.bool)
        accepted_B, token_B, winner_B = torch.zeros_like(lead_B), torch.zeros_like(lead_B), lead_B
        for depth in range(chains.max_length + 1):
            target_BV = target.select(winner_B).rows_at(depth).double()
            if depth < chains.max_length:
                draft_BV = chains.draft.select(winner_B).rows_at(depth).double()
                drafted_BK = chains.tokens_CL[chain_BK, depth]
                present_BK = alive_BK & (depth < chains.length_C[chain_BK])
                leads_BK = True if chains.leads_CL is None else chains.leads_CL[chain_BK, depth]
                probs_BV = self.node_rule(target_BV, draft_BV, *packed(drafted_BK, present_BK & leads_BK))
            else:
                drafted_BK, present_BK = torch.zeros_like(chain_BK), torch.zeros_like(alive_BK)
                probs_BV = target_BV
            drawn_B = categorical(probs_BV, uniform_BL1[:, depth])
            token_B = torch.where(running_B, drawn_B, token_B)
            alive_BK = present_BK & (drafted_BK == drawn_B.unsqueeze(1)) & running_B.unsqueeze(1)
            running_B = alive_BK.any(1)
            accepted_B = accepted_B + running_B
            first_B = alive_BK.int().argmax(1, keepdim=True)
            winner_B = torch.where(running_B, chain_BK.gather(1, first_B).squeeze(1), winner_B)
        return ChainVerdict(winner_B, accepted_B, token_B)
