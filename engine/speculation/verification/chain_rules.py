"""Rules of whole chains that are kernels: token verification, the score race, the longest match.

Token verification of one chain (Leviathan et al. 2023, Chen et al. 2023): a drafted token x is
accepted with probability min(1, p(x)/q(x)); at the first rejection the next token is drawn
from norm (p - q)+, after a whole accepted chain from p. Expected accepted length: E_{Y~p}
sum_i prod_{j<=i} min(1, q_j(Y_j)/p_j(Y_j)).

The score race, which with one chain is block verification:
`engine.kernels.torch_block` has the algorithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.kernels.torch_block import longest_match


def token_acceptance(chains: Chains, target: ProbsTable) -> Tensor:
    """Return [C, L] each token's chance to be accepted after the tokens before it."""
    ratio_CL = (target.along(chains.tokens_CL) / chains.draft.along(chains.tokens_CL)).clamp(max=1.0)
    depth_L = torch.arange(chains.max_length, device=ratio_CL.device)
    return torch.where(depth_L < chains.length_C.unsqueeze(1), ratio_CL, 0.0)


def verify_token(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """Accept the tokens before the first rejection."""
    rejected_CL = noise.accept_CL >= token_acceptance(chains, target)
    accepted_C = (rejected_CL.cumsum(-1) == 0).sum(-1)
    next_token_C = target.kernels.draw_residual(
        chains, target, accepted_C, torch.ones_like(noise.score_C), noise.residual_C
    )
    order_C = torch.arange(chains.num_chains, device=accepted_C.device)
    return ChainVerdict(order_C, accepted_C, next_token_C)


def verify_race(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """Race the chains of each request, and emit the winner's accepted prefix and next token."""
    return target.kernels.race(chains, target, noise)


def verify_certain(chains: Chains, target: ProbsTable, _noise: ChainNoise) -> ChainVerdict:
    """Follow each request's chain with the longest match, and emit the target's next token.

    target: laws with one token each (temperature 0, or a seed that fixes the answer). Every rule
    then accepts exactly the tokens that the target would emit; this one accepts any set of drafts.
    """
    accepted_C, next_token_C = longest_match(chains, target.probs_NV.argmax(1)[target.row_CX])
    return target.kernels.winners(chains, -accepted_C.double(), accepted_C, next_token_C)
