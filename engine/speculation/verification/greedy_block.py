"""Greedy block verification (Sun et al.), alone and after the score race.

Along a chain whose law is G (the draft law of one chain, or the law of the chain the score race
selects among K; `target_shift.py` has g = G_vx/P_v and gamma = G_v/P_v):
  accept  h_i = min(1, sum_x (p - g)+ / sum_x (g - p)+) at the node below i tokens, i < L;  h_L =
  min(1, 1/gamma)
The accepted length is the largest i whose uniform number falls below h_i; then the next token is
drawn from norm (p - g)+, after a whole chain from p. Prefix v is accepted with probability min(P_v,
G_v), the most that any rule can keep of one chain, so E[tau] = sum_v min(P_v, G_v). The price: the
positions up to the end of the block follow a changed target (a shift); without it the output would
be biased (`docs/speculation-rules.md`).

`spectr_gbv`: the score race selects a chain; its accepted length and token are discarded, and the
decisions about the selected chain use numbers that had no part in the selection. G_v >= P_v
f_K(min(1, Q_v/P_v)) for every v, so E[tau] is at least the SpecTr-GBV bound (Lin et al.), whose
published acceptance rule is biased for K >= 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable, TargetShifts
from engine.kernels.torch_block import accepted_length, chain_table
from engine.speculation.target_shift import Selection, apply_shifts, effective_laws, root_state
from engine.speculation.verification.chain_rules import verify_race


@dataclass(frozen=True)
class GreedyBlocks:
    """Inputs of greedy block verification for each chain, before it draws; float64."""

    accept_CL: Tensor
    """h_i for i = 1..L; 0 past a chain's end."""
    state_CX4: Tensor
    """State of the node below i tokens, i = 0..L."""


def greedy_blocks(chains: Chains, target: ProbsTable, count_C: Tensor) -> GreedyBlocks:
    """Walk down chains selected among `count_C`; `target` has all shifts applied."""
    state_C4 = root_state(chains.num_chains, chains.length_C.device)
    alive_C = torch.ones_like(chains.length_C, dtype=torch.bool)
    states, accepts = [state_C4], []
    for depth in range(chains.max_length):
        target_CV, draft_CV = target.rows_at(depth).double(), chains.draft.rows_at(depth).double()
        selection = Selection.at(target_CV, draft_CV, state_C4, count_C)
        if depth > 0:
            lacking_C, exceeding_C = (
                d.clamp(min=0).sum(1) for d in (target_CV - selection.mass_NV, selection.mass_NV - target_CV)
            )
            inner_C = torch.where(exceeding_C > 0, lacking_C / exceeding_C, 1.0).clamp(max=1.0)
            accepts.append(torch.where(depth < chains.length_C, inner_C, _whole(state_C4)) * alive_C)
        token_C = chains.tokens_CL[:, depth]
        alive_C = alive_C & (target.probability(torch.full_like(token_C, depth), token_C) > 0)
        state_C4 = selection.below(token_C)
        states.append(state_C4)
    accepts.append(_whole(state_C4) * alive_C)
    depth_L = torch.arange(1, chains.max_length + 1, device=chains.length_C.device)
    accept_CL = torch.stack(accepts, 1)[:, : chains.max_length]
    within_CL = depth_L <= chains.length_C.unsqueeze(1)
    return GreedyBlocks(torch.where(within_CL, accept_CL, 0.0), torch.stack(states, 1))


def _whole(state_C4: Tensor) -> Tensor:
    """Return [C] h_L = min(1, 1/gamma)."""
    return (1 / state_C4[:, 3].clamp(min=1.0)).clamp(max=1.0)


def selection_at(
    chains: Chains, target: ProbsTable, known: GreedyBlocks, count_C: Tensor, accepted_C: Tensor
) -> Selection:
    """Return the selected chain's law below `accepted_C` tokens (undefined at its end)."""
    state_C4 = known.state_CX4[torch.arange(chains.num_chains, device=accepted_C.device), accepted_C]
    target_CV = target.rows(accepted_C).double()
    draft_CV = chains.draft.rows(accepted_C.clamp(max=chains.max_length - 1)).double()
    return Selection.at(target_CV, draft_CV, state_C4, count_C)


def next_token_weights(chains: Chains, selection: Selection, accepted_C: Tensor) -> Tensor:
    """Return [C, V] weights of the token after the accepted prefix."""
    missing_CV = selection.missing()
    usable_C = (accepted_C < chains.length_C) & (missing_CV.sum(1) > 0)
    return torch.where(usable_C.unsqueeze(1), missing_CV, selection.target_NV)


def shifts_after(
    chains: Chains,
    plain: ProbsTable,
    states_CXM4: Tensor | None,
    selection: Selection,
    count_C: Tensor,
    accepted_C: Tensor,
    next_token_C: Tensor,
) -> TargetShifts:
    """Return the old shifts advanced, and this block's.

    plain: target laws without shifts; states_CXM4: of the old shifts (`effective_laws`).
    """
    emitted_C = accepted_C + 1
    remaining_CM = (chains.length_C - emitted_C).unsqueeze(1)
    state_CM4, num_CM = selection.below(next_token_C).unsqueeze(1), count_C.unsqueeze(1)
    if states_CXM4 is not None:
        assert chains.shifts is not None
        each_C = torch.arange(chains.num_chains, device=accepted_C.device)
        here = replace(chains.shifts, state_CM4=states_CXM4[each_C, accepted_C])
        draft_CV = chains.draft.rows(accepted_C.clamp(max=chains.max_length - 1)).double()
        _, moved = apply_shifts(plain.rows(accepted_C).double(), draft_CV, here, accepted_C, next_token_C)
        remaining_CM = torch.cat([moved.remaining_CM - emitted_C.unsqueeze(1), remaining_CM], 1)
        state_CM4 = torch.cat([moved.state_CM4, state_CM4], 1)
        num_CM = torch.cat([moved.num_chains_CM, num_CM], 1)
    return TargetShifts(remaining_CM.clamp(min=0), state_CM4, num_CM)


def verify_greedy_block(chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
    """Verify each request's chain, or the one that the score race selects among several."""
    laws, states_CXM4 = effective_laws(chains, target)
    chain_BK, exists_BK = chain_table(chains)
    chain_B, count_B = chain_BK[:, 0], exists_BK.sum(1)
    if chains.shape[1] > 1:
        chain_B = verify_race(chains, laws, noise).chain_B
    chosen, plain = chains.select(chain_B, (len(chain_B), 1)), target.select(chain_B)
    laws, noise = laws.select(chain_B), noise.select(chain_B)
    known = greedy_blocks(chosen, laws, count_B)
    accepted_B = accepted_length(known.accept_CL, noise.chosen_accept_CL)
    selection = selection_at(chosen, laws, known, count_B, accepted_B)
    next_token_B = categorical(next_token_weights(chosen, selection, accepted_B), noise.chosen_residual_C)
    states_BXM4 = None if states_CXM4 is None else states_CXM4[chain_B]
    shifts = shifts_after(chosen, plain, states_BXM4, selection, count_B, accepted_B, next_token_B)
    return ChainVerdict(chain_B, accepted_B, next_token_B, shifts=shifts)
