"""Token verification of one chain (Leviathan et al. 2023, Chen et al. 2023).

A drafted token x is accepted with probability min(1, p(x)/q(x)); at the first rejection the next
token is drawn from norm (p - q)+, after a whole accepted chain from p.
Expected accepted length: E_{Y~p} sum_i prod_{j<=i} min(1, q_j(Y_j)/p_j(Y_j)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification.rule import ChainVerdict, draw_residual


def token_acceptance(chains: Chains, target: LawTable) -> Tensor:
    """[C, L] probability that each drafted token is accepted once those before it are; 0 past the end."""
    accept_CL = torch.zeros(chains.tokens_CL.shape, dtype=torch.float64, device=chains.tokens_CL.device)
    for depth in range(chains.max_length):
        depth_C = torch.full_like(chains.length_C, depth)
        token_C = chains.tokens_CL[:, depth]
        target_C = target.probability(depth_C, token_C)
        draft_C = chains.draft.probability(depth_C, token_C)
        ratio_C = (target_C / draft_C).clamp(max=1.0)
        accept_CL[:, depth] = torch.where(depth < chains.length_C, ratio_C, 0.0)
    return accept_CL


def verify_token(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """Accept the tokens before the first rejection."""
    rejected_CL = noise.accept_CL >= token_acceptance(chains, target)
    accepted_C = (rejected_CL.cumsum(-1) == 0).sum(-1)
    next_token_C = draw_residual(chains, target, accepted_C, torch.ones_like(noise.score_C), noise.residual_C)
    order_C = torch.arange(chains.num_chains, device=accepted_C.device)
    return ChainVerdict(order_C, accepted_C, next_token_C)
