"""Pending changes of the target law, by greedy block verification.

`greedy_block` and `spectr_gbv` accept more of a block than rules that leave the target unchanged.
The excess is missing from the positions up to the end of the block's *window*. After a block of L
drafted tokens that stopped at tau, the next L - tau - 1 positions therefore follow p'(x|v) = norm_x
(P_v p(x|v) - G_vx)+ instead of p, where P is the joint law of the target and G that of the selected
chain, both since the block began. A later block inside the window uses p' as its target and may
cause another change, so changes nest: one *shift* each, oldest first.

G is that of the chain which the score race selects among K (`verification/chain_rules.py`); with
one chain G is the draft law. With f_K(t) = 1 - (1 - t)^K and all joint probabilities divided by
P_v, a node's *state* is (r, u, carry, gamma):
  r = Q_v/P_v, u = the ceiling min(1, min R), gamma = G_v/P_v, carry = what its parent hands down; m
  = min(p u, r q);  u_x = m/p;  e = (r q - m)+;  kappa = e/sum e;  eta = (f_K(u) - sum p f_K(u_x))+
  + carry; g = p f_K(u_x) + kappa eta = G_vx/P_v;   child x: (r q_x/p_x, u_x, kappa_x eta/p_x,
  g_x/p_x).
A node with target mass 0 is dead; its state is any finite one.

Not for: deciding what is accepted (`verification.greedy_block`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.kernels.protocol import Chains, ProbsTable, TargetShifts

_TINY = 1e-15
_HUGE = 1e100


@cache
def _state(values: tuple[float, float, float, float], device: torch.device) -> Tensor:
    """Return [4] values on the device, made once because the host waits for such copies."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float64, device=device)


def root_state(count: int, device: torch.device) -> Tensor:
    """Return [N, 4] state of the node at which a block begins."""
    return _state((1.0, 1.0, 0.0, 1.0), device).expand(count, 4)


def at_least_one(probability: Tensor, count: Tensor) -> Tensor:
    """Return f_K(t) = 1 - (1 - t)^K."""
    return -torch.expm1(count * torch.log1p(-probability.clamp(0.0, 1.0)))


@dataclass(frozen=True)
class Selection:
    """Law of the selected chain below N nodes, relative to the target's mass; float64."""

    mass_NV: Tensor
    """g."""
    ceiling_NV: Tensor
    """u_x."""
    handed_NV: Tensor
    """kappa eta."""
    target_NV: Tensor
    draft_NV: Tensor
    state_N4: Tensor

    @staticmethod
    def at(target_NV: Tensor, draft_NV: Tensor, state_N4: Tensor, count_N: Tensor) -> Selection:
        """Compute the selection among `count_N` chains at nodes with these states."""
        ratio_N1, ceiling_N1, carry_N1 = (state_N4[:, i : i + 1] for i in range(3))
        count_N1 = count_N.double().unsqueeze(1)
        drafted_NV = ratio_N1 * draft_NV
        core_NV = torch.minimum(target_NV * ceiling_N1, drafted_NV)
        below_NV = torch.where(target_NV > 0, core_NV / torch.where(target_NV > 0, target_NV, 1.0), 0.0)
        kept_NV = target_NV * at_least_one(below_NV, count_N1)
        excess_NV = (drafted_NV - core_NV).clamp(min=0)
        total_N1 = excess_NV.sum(1, keepdim=True)
        left_N1 = (at_least_one(ceiling_N1, count_N1) - kept_NV.sum(1, keepdim=True)).clamp(min=0) + carry_N1
        share_NV = torch.where(total_N1 > _TINY, excess_NV / torch.where(total_N1 > _TINY, total_N1, 1.0), 0.0)
        handed_NV = share_NV * left_N1
        return Selection(kept_NV + handed_NV, below_NV, handed_NV, target_NV, draft_NV, state_N4)

    def missing(self) -> Tensor:
        """Return [N, V] mass (p - g)+ that accepted chains do not supply."""
        return (self.target_NV - self.mass_NV).clamp(min=0)

    def below(self, token_N: Tensor) -> Tensor:
        """Return [N, 4] state of each node's child."""
        token_N1 = token_N.unsqueeze(1)
        target_N1 = self.target_NV.gather(1, token_N1)
        alive_N1 = target_N1 > 0
        safe_N1 = torch.where(alive_N1, target_N1, 1.0)
        state_N4 = torch.cat(
            [
                self.state_N4[:, :1] * self.draft_NV.gather(1, token_N1) / safe_N1,
                self.ceiling_NV.gather(1, token_N1),
                self.handed_NV.gather(1, token_N1) / safe_N1,
                self.mass_NV.gather(1, token_N1) / safe_N1,
            ],
            1,
        )
        # Ratios of a target that nearly excludes the drafted tokens; beyond this bound only the
        # draft's shape matters.
        state_N4 = state_N4.clamp(max=_HUGE)
        return torch.where(alive_N1, state_N4, _state((1.0, 0.0, 0.0, 1.0), state_N4.device))


def apply_shifts(
    target_NV: Tensor, draft_NV: Tensor, shifts: TargetShifts, depth_N: Tensor, token_N: Tensor
) -> tuple[Tensor, TargetShifts]:
    """Return ([N, V] laws at nodes, the shifts with the states of child `token_N`)."""
    states = []
    for m in range(shifts.remaining_CM.shape[1]):
        state_N4, holds_N1 = shifts.state_CM4[:, m], (shifts.remaining_CM[:, m] > depth_N).unsqueeze(1)
        selection = Selection.at(target_NV, draft_NV, state_N4, shifts.num_chains_CM[:, m])
        states.append(torch.where(holds_N1, selection.below(token_N), state_N4))
        missing_NV = selection.missing()
        total_N1 = missing_NV.sum(1, keepdim=True)
        # Without missing mass the node has probability zero.
        changed_N1 = holds_N1 & (total_N1 > 0)
        target_NV = torch.where(changed_N1, missing_NV / torch.where(total_N1 > 0, total_N1, 1.0), target_NV)
    return target_NV, TargetShifts(shifts.remaining_CM, torch.stack(states, 1), shifts.num_chains_CM)


def effective_laws(chains: Chains, target: ProbsTable) -> tuple[ProbsTable, Tensor | None]:
    """Return (laws along chains, [C, L + 1, M, 4] states of shifts, None without).

    No shift holds after a whole chain: a window ends with its block or the answer.
    """
    if chains.shifts is None:
        return target, None
    laws, shifts = [], [chains.shifts]
    for depth in range(chains.max_length):
        rows_CV, draft_CV = target.rows_at(depth).double(), chains.draft.rows_at(depth).double()
        depth_C = torch.full_like(chains.length_C, depth)
        changed_CV, after = apply_shifts(rows_CV, draft_CV, shifts[-1], depth_C, chains.tokens_CL[:, depth])
        laws.append(changed_CV.to(target.probs_NV.dtype))
        shifts.append(after)
    probs_CXV = torch.stack([*laws, target.rows_at(chains.max_length)], 1)
    row_CX = torch.arange(probs_CXV[..., 0].numel(), device=probs_CXV.device).view(probs_CXV.shape[:2])
    states_CXM4 = torch.stack([one.state_CM4 for one in shifts], 1)
    return ProbsTable(probs_CXV.flatten(0, 1), row_CX, target.kernels), states_CXM4
