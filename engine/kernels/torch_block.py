"""Block verification of one chain (Sun et al., ICLR 2025; `docs/speculation-rules.md`).

With R_i = prod_{j<=i} q_j(x_j)/p_j(x_j) along a chain x:
  ceiling u_i = min(1, min_{j<=i} R_j)      probability that prefix i is accepted, given it is the
  truth weight  w_i = u_i / R_i                   0 on a dead prefix (some p_j(x_j) = 0) surplus S_i
  = sum_x (w_i p(x|x^i) - q(x|x^i))+ accept  h_i = S_i / (S_i + 1 - w_i) for i < L,  h_L = w_L
The accepted length is the largest i whose uniform number falls below h_i; then the next token is
drawn from norm (w_i p - q)+, after a whole accepted chain from p. Later steps are unchanged.
Expected accepted length: E_{Y~p} sum_i u_i(Y), never less than token verification's.

The score race of several chains: every chain runs block verification alone and draws a score that
is independent of its output; the chain with the smallest score wins. Given that a chain's output
begins with Y, its score is uniform on (0, 1]: it lies in (u_{i+1}, u_i] exactly when the chain
stops at i, where u_i is the ceiling of the first i tokens of Y. So choosing by score leaves the
winner's distribution the target's own, and the smallest of K scores is below t with probability 1 -
(1-t)^K:
  E[tau] = E_{Y~p} sum_i 1 - (1 - u_i(Y))^K.
Chains need only be independent given the context; lengths and draft distributions may differ. With
one chain this is block verification.

Plain operations: the specification of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable


def chain_table(chains: Chains) -> tuple[Tensor, Tensor]:
    """Return ([B, K] the chains of each request in order, [B, K] whether there is one).

    Every request has a chain in column 0, its first remaining chain; missing entries are chain 0.
    """
    request_C = chains.request_C
    chain_C = torch.arange(chains.num_chains, device=request_C.device)
    begins_C = torch.ones_like(request_C, dtype=torch.bool)
    begins_C[1:] = request_C[1:] != request_C[:-1]
    number_C = begins_C.cumsum(0) - 1
    place_C = chain_C - torch.where(begins_C, chain_C, 0).cummax(0).values
    chain_BK = torch.zeros(chains.shape, dtype=torch.int64, device=request_C.device)
    exists_BK = torch.zeros(chains.shape, dtype=torch.bool, device=request_C.device)
    chain_BK[number_C, place_C] = chain_C
    # A number of the host would be waited for.
    exists_BK[number_C, place_C] = exists_BK.new_ones(())
    return chain_BK, exists_BK


def surplus(target_CV: Tensor, draft_CV: Tensor, weight_C: Tensor) -> Tensor:
    """Return [C, V] the mass (weight * target - draft)+."""
    return (weight_C.unsqueeze(-1).to(target_CV.dtype) * target_CV - draft_CV).clamp_(min=0)


def residual(chains: Chains, target: ProbsTable, accepted_C: Tensor, weight_C: Tensor) -> Tensor:
    """Return [C, V] weights of the token after the first `accepted_C` tokens of each chain.

    They are the surplus of the weighted target distribution over the draft distribution. After a
    whole chain, and if rounding leaves no surplus, they are the target distribution. (In the second
    case target and draft agree, so the branch has probability zero, but the draw must be defined.)
    """
    target_CV = target.rows(accepted_C)
    if chains.max_length == 0:
        return target_CV
    stopped_C = accepted_C < chains.length_C
    draft_CV = chains.draft.rows(accepted_C.clamp(max=chains.max_length - 1))
    mass_CV = surplus(target_CV, draft_CV, weight_C)
    usable_C = stopped_C & (mass_CV.sum(-1) > 0)
    return torch.where(usable_C.unsqueeze(-1), mass_CV, target_CV)


@dataclass(frozen=True)
class Blocks:
    """Inputs of block verification for each chain, before it draws; all float64."""

    log_ratio_CL1: Tensor
    """log R_i, i = 0..L; +inf on a dead prefix."""
    ceiling_CL1: Tensor
    """u_i."""
    weight_CL1: Tensor
    """w_i."""
    accept_CL: Tensor
    """h_i for i = 1..L; 0 past a chain's end."""


def blocks(chains: Chains, target: ProbsTable) -> Blocks:
    """Compute all prefixes of every chain; few [C, V] arrays are in memory at any time."""
    target_CL = target.along(chains.tokens_CL)
    draft_CL = chains.draft.along(chains.tokens_CL)
    # A prefix is dead after a token that the target never emits, or after a ratio of 0.
    never_CL = target_CL <= 0
    free_CL = draft_CL <= 0
    dead_CL = never_CL.cumsum(1) + free_CL.cumsum(1) - free_CL.long() > 0
    step_CL = torch.where(dead_CL, 0.0, draft_CL.log() - target_CL.log())
    log_ratio_CL1 = pad(torch.where(dead_CL, torch.inf, step_CL.cumsum(1)), (1, 0))
    log_ceiling_CL1 = log_ratio_CL1.cummin(1).values
    weight_CL1 = torch.where(pad(dead_CL, (1, 0)), 0.0, (log_ceiling_CL1 - log_ratio_CL1).exp())
    depths = range(1, chains.max_length)
    inner = [_accept(chains, target, depth, weight_CL1[:, depth]) for depth in depths]
    accept_CL = torch.stack([*inner, weight_CL1[:, -1]], 1)[:, : chains.max_length]
    depth_L = torch.arange(1, chains.max_length + 1, device=chains.length_C.device)
    return Blocks(
        log_ratio_CL1,
        log_ceiling_CL1.exp(),
        weight_CL1,
        torch.where(depth_L <= chains.length_C.unsqueeze(1), accept_CL, 0.0),
    )


def _accept(chains: Chains, target: ProbsTable, depth: int, weight_C: Tensor) -> Tensor:
    """Return [C] h_i at i = `depth`, 0 < i < L; h_L = w_L if the chain ends here."""
    rows = target.rows_at(depth), chains.draft.rows_at(depth)
    surplus_C = surplus(*rows, weight_C).sum(-1, dtype=torch.float64)
    inner_C = torch.where(weight_C >= 1, 1.0, surplus_C / (surplus_C + 1 - weight_C))
    return torch.where(depth < chains.length_C, inner_C, weight_C)


def accepted_length(accept_CL: Tensor, uniform_CL: Tensor) -> Tensor:
    """Return [C] the largest i with uniform_i < accept_i; 0 if there is none."""
    depth_L1 = torch.arange(accept_CL.shape[1] + 1, device=accept_CL.device)
    passed_CL1 = pad(uniform_CL < accept_CL, (1, 0), value=True)
    return torch.where(passed_CL1, depth_L1, 0).amax(1)


def stop_chains(chains: Chains, target: ProbsTable, known: Blocks, noise: ChainNoise) -> tuple[Tensor, Tensor]:
    """Return ([C] accepted length, [C] next token) of each chain alone."""
    accepted_C = accepted_length(known.accept_CL, noise.accept_CL)
    weight_C = known.weight_CL1.gather(1, accepted_C.unsqueeze(1)).squeeze(1)
    next_token_C = target.kernels.draw_residual(chains, target, accepted_C, weight_C, noise.residual_C)
    return accepted_C, next_token_C


def score_bounds(
    chains: Chains, target: ProbsTable, known: Blocks, accepted_C: Tensor, next_token_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ([C] lower, [C] upper) bounds of a chain's uniform score; float64.

    Upper is the ceiling of the accepted prefix, lower that of the prefix with the next token: 0
    after a whole chain, and off the draft distribution's support.
    """
    index_C1 = accepted_C.unsqueeze(1)
    upper_C = known.ceiling_CL1.gather(1, index_C1).squeeze(1)
    if chains.max_length == 0:
        return torch.zeros_like(upper_C), upper_C
    target_C = target.probability(accepted_C, next_token_C)
    draft_C = chains.draft.probability(accepted_C.clamp(max=chains.max_length - 1), next_token_C)
    log_ratio_C = known.log_ratio_CL1.gather(1, index_C1).squeeze(1)
    extended_C = (log_ratio_C + draft_C.log() - target_C.log()).exp()
    lower_C = torch.minimum(upper_C, extended_C)
    return torch.where(accepted_C < chains.length_C, lower_C, 0.0), upper_C


def race(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """Race the chains of each request; the winner's accepted prefix and next token are emitted."""
    known = blocks(chains, target)
    accepted_C, next_token_C = stop_chains(chains, target, known, noise)
    lower_C, upper_C = score_bounds(chains, target, known, accepted_C, next_token_C)
    score_C = lower_C + (upper_C - lower_C) * (1 - noise.score_C)
    return winners(chains, score_C, accepted_C, next_token_C)


def longest_match(chains: Chains, certain_CX: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([C] leading tokens that are the most likely, [C] next most likely token).

    certain_CX: [C, L + 1] the most likely token below the first i tokens of each chain.
    """
    depth_L = torch.arange(chains.max_length, device=certain_CX.device)
    is_drafted_CL = depth_L < chains.length_C.unsqueeze(1)
    matches_CL = (chains.tokens_CL == certain_CX[:, : chains.max_length]) & is_drafted_CL
    accepted_C = matches_CL.cumprod(1).sum(1)
    return accepted_C, certain_CX.gather(1, accepted_C.unsqueeze(1)).squeeze(1)


def winners(chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
    """Return each request's chain with the smallest score (ties: the first)."""
    chain_BK, exists_BK = chain_table(chains)
    score_BK = torch.where(exists_BK, score_C[chain_BK], torch.inf)
    winner_B = chain_BK.gather(1, score_BK.argmin(1, keepdim=True)).squeeze(1)
    return ChainVerdict(winner_B, accepted_C[winner_B], next_token_C[winner_B])
