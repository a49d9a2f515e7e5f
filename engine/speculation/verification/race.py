"""The score race: exact block verification of several chains (`docs/speculation-rules.md`).

Every chain runs plain block verification on its own and draws a score that is independent of
what it would emit; the chain with the smallest score wins. Given that a chain's output begins
with Y, its score is uniform on (0, 1]: it lies in (u_{i+1}, u_i] exactly when the chain stops at
i, where u_i is the ceiling of the first i tokens of Y. So choosing by score leaves the winner's
law the target's own, and the smallest of K scores is below t with probability 1 - (1-t)^K:
  E[tau] = E_{Y~p} sum_i 1 - (1 - u_i(Y))^K.
Chains need only be independent given the context; lengths and draft laws may differ. With one
chain this is block verification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.speculation.drafting import ChainNoise, Chains, LawTable
from engine.speculation.verification import fused_block
from engine.speculation.verification.block import Blocks, blocks, stop_chains
from engine.speculation.verification.rule import ChainVerdict, chain_table


def score_bounds(
    chains: Chains, target: LawTable, known: Blocks, accepted_C: Tensor, next_token_C: Tensor
) -> tuple[Tensor, Tensor]:
    """([C] lower, [C] upper) end of the interval a chain's score is uniform on; float64.

    Upper is the ceiling of the accepted prefix, lower that of the prefix with the next token
    appended: 0 after a whole chain (no further ceiling) and off the draft law's support.
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


def first_per_request(score_C: Tensor, chains: Chains) -> Tensor:
    """[B] the chain with the smallest score among each request's (ties: the first)."""
    chain_BK, exists_BK = chain_table(chains)
    score_BK = torch.where(exists_BK, score_C[chain_BK], torch.inf)
    return chain_BK.gather(1, score_BK.argmin(1, keepdim=True)).squeeze(1)


def verify_bv_race(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """Race the chains of each request; the winner's accepted prefix and next token are emitted."""
    compiler = fused_block.compiler_for(chains, target.law_NV)
    if compiler is not None:
        return fused_block.race_of(compiler)(chains, target, noise)
    return race_plainly(chains, target, noise)


def race_plainly(chains: Chains, target: LawTable, noise: ChainNoise) -> ChainVerdict:
    """The same by plain operations, the reference for the kernels.

    It must not call `fused_block.compiler_for`: the check that decides whether kernels are used
    (`fused_block.find_fault`) calls this function.
    """
    known = blocks(chains, target)
    accepted_C, next_token_C = stop_chains(chains, target, known, noise)
    lower_C, upper_C = score_bounds(chains, target, known, accepted_C, next_token_C)
    score_C = lower_C + (upper_C - lower_C) * (1 - noise.score_C)
    return _winners_plainly(chains, score_C, accepted_C, next_token_C)


def winners(chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
    """Each request's chain with the smallest score (ties: the first), with what it accepted and its next token."""
    if fused_block.compiler_for(chains, score_C) == "Triton":
        return fused_block.winners(chains, score_C, accepted_C, next_token_C)
    return _winners_plainly(chains, score_C, accepted_C, next_token_C)


def _winners_plainly(chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
    winner_B = first_per_request(score_C, chains)
    return ChainVerdict(winner_B, accepted_C[winner_B], next_token_C[winner_B])
