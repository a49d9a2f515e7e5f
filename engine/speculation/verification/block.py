"""Block verification of one chain (Sun et al., ICLR 2025; `docs/speculation-rules.md`).

With R_i = prod_{j<=i} q_j(x_j)/p_j(x_j) along a chain x:
  ceiling u_i = min(1, min_{j<=i} R_j)      probability that prefix i is accepted, given it is the truth
  weight  w_i = u_i / R_i                   0 on a dead prefix (some p_j(x_j) = 0)
  surplus S_i = sum_x (w_i p(x|x^i) - q(x|x^i))+
  accept  h_i = S_i / (S_i + 1 - w_i) for i < L,  h_L = w_L
The accepted length is the largest i whose uniform number falls below h_i; then the next token is
drawn from norm (w_i p - q)+, after a whole accepted chain from p. Later steps are unchanged.
Expected accepted length: E_{Y~p} sum_i u_i(Y), never less than token verification's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification import fused_block
from engine.speculation.verification.rule import ChainVerdict, draw_residual, surplus_sum


@dataclass(frozen=True)
class Blocks:
    """What block verification knows of each chain before it draws; all float64."""

    log_ratio_CL1: Tensor
    """log R_i, i = 0..L; +inf on a dead prefix."""
    ceiling_CL1: Tensor
    """u_i."""
    weight_CL1: Tensor
    """w_i."""
    accept_CL: Tensor
    """h_i for i = 1..L; 0 past a chain's end."""


def blocks(chains: Chains, target: LawTable) -> Blocks:
    """All prefixes of every chain; of whole laws, memory is a few [C, V] rows at a time."""
    target_CL, draft_CL = target.along(chains.tokens_CL), chains.draft.along(chains.tokens_CL)
    # A prefix is dead behind a token that the target never emits, or a ratio of 0.
    never_CL, free_CL = target_CL <= 0, draft_CL <= 0
    dead_CL = never_CL.cumsum(1) + free_CL.cumsum(1) - free_CL.long() > 0
    step_CL = torch.where(dead_CL, 0.0, draft_CL.log() - target_CL.log())
    log_ratio_CL1 = pad(torch.where(dead_CL, torch.inf, step_CL.cumsum(1)), (1, 0))
    log_ceiling_CL1 = log_ratio_CL1.cummin(1).values
    weight_CL1 = torch.where(pad(dead_CL, (1, 0)), 0.0, (log_ceiling_CL1 - log_ratio_CL1).exp())
    inner = [_accept(chains, target, depth, weight_CL1[:, depth]) for depth in range(1, chains.max_length)]
    accept_CL = torch.stack([*inner, weight_CL1[:, -1]], 1)[:, : chains.max_length]
    depth_L = torch.arange(1, chains.max_length + 1, device=chains.length_C.device)
    return Blocks(
        log_ratio_CL1,
        log_ceiling_CL1.exp(),
        weight_CL1,
        torch.where(depth_L <= chains.length_C.unsqueeze(1), accept_CL, 0.0),
    )


def _accept(chains: Chains, target: LawTable, depth: int, weight_C: Tensor) -> Tensor:
    """[C] h_i at i = `depth`, 0 < i < L; h_L = w_L where the chain ends here."""
    surplus_C = surplus_sum(chains, target, depth, weight_C)
    inner_C = torch.where(weight_C >= 1, 1.0, surplus_C / (surplus_C + 1 - weight_C))
    return torch.where(depth < chains.length_C, inner_C, weight_C)


def accepted_length(accept_CL: Tensor, uniform_CL: Tensor) -> Tensor:
    """[C] the largest i with uniform_i < accept_i; 0 where there is none."""
    depth_L1 = torch.arange(accept_CL.shape[1] + 1, device=accept_CL.device)
    passed_CL1 = pad(uniform_CL < accept_CL, (1, 0), value=True)
    return torch.where(passed_CL1, depth_L1, 0).amax(1)


def stop_chains(chains: Chains, target: LawTable, known: Blocks, noise: ChainNoise) -> tuple[Tensor, Tensor]:
    """([C] accepted length, [C] next token) of each chain on its own."""
    accepted_C = accepted_length(known.accept_CL, noise.accept_CL)
    weight_C = known.weight_CL1.gather(1, accepted_C.unsqueeze(1)).squeeze(1)
    return accepted_C, draw_residual(chains, target, accepted_C, weight_C, noise.residual_C)


def verify_block(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """One chain per request: accept its longest prefix that block verification allows."""
    compiler = fused_block.compiler_for(chains, target.law_NV)
    if compiler is not None:
        return fused_block.race_of(compiler)(chains, target, noise)
    accepted_C, next_token_C = stop_chains(chains, target, blocks(chains, target), noise)
    order_C = torch.arange(chains.num_chains, device=accepted_C.device)
    return ChainVerdict(order_C, accepted_C, next_token_C)
