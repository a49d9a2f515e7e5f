"""The weighted race: the optimum alpha* for n i.i.d. drafts, over the whole vocabulary, in O(V log V).

Tokens are sorted by p/q descending. With t and P the cumulative q and p and F = 1 - (1 - t)^n, the accepted
mass per token is a = diff G, G = P + min(0, cummin(F - P)): the largest accepted masses that n drafts can
supply (`a(H) <= 1 - (1 - q(H))^n` for all sets H). Every copy k draws U_k; the copy with the smallest segment and,
in it, the largest w_x U_k wins, and is accepted unless it lies beyond the point where all needs are met;
then the token is drawn from norm (p - a). `w` solves the supply balance token by token: token i joins the
race at s_i, the root of 1 - (1 - s)^n = c_i + d_i s, and until it joins the others' remaining supply decays by
(t - s_{i+1})/(t - s_i). A tight knot (F = G) starts a new segment. See `docs/speculation.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.speculation.verification.node import normalised

_TIGHT = 1e-13
_NEWTON_STEPS = 30


@dataclass(frozen=True)
class RaceTable:
    """What the race needs to know of every token; float64."""

    accepted_NV: Tensor
    """a: accepted mass by token."""
    log_weight_NV: Tensor
    segment_NV: Tensor
    last_segment_N: Tensor
    log_threshold_N: Tensor
    """In the last segment only keys at least this large are accepted."""

    @property
    def alpha(self) -> Tensor:
        """[N] the optimum acceptance."""
        return self.accepted_NV.sum(1)


def race_table(target_NV: Tensor, draft_NV: Tensor, count_N: Tensor) -> RaceTable:
    """Sort once, sweep once; `count_N` drafts per row (at least 1)."""
    safe_NV = torch.where(draft_NV > 0, draft_NV, 1.0)
    order_NV = torch.where(draft_NV > 0, target_NV / safe_NV, torch.inf).argsort(dim=1, descending=True, stable=True)
    p_NV, q_NV = target_NV.gather(1, order_NV), draft_NV.gather(1, order_NV)
    n_N1 = count_N.to(target_NV.dtype).unsqueeze(1)
    t_NV, total_NV = q_NV.cumsum(1).clamp(max=1.0), p_NV.cumsum(1)
    supply_NV = torch.where(t_NV >= 1 - 1e-15, 1.0, -torch.expm1(n_N1 * torch.log1p(-t_NV.clamp(max=1 - 1e-16))))
    reached_NV = total_NV + (supply_NV - total_NV).cummin(1).values.clamp(max=0)
    reached_NV = reached_NV.clamp(min=0).cummax(1).values
    accepted_NV = torch.diff(reached_NV, dim=1, prepend=torch.zeros_like(n_N1))
    tight_NV = supply_NV - reached_NV <= _TIGHT
    starts_NV = torch.cat([torch.ones_like(tight_NV[:, :1]), tight_NV[:, :-1]], 1)
    joined_NV = _join_points(accepted_NV, q_NV, t_NV, reached_NV, starts_NV, n_N1)
    alpha_N = reached_NV[:, -1]
    end_N1 = (1 - (1 - alpha_N.clamp(max=1.0)) ** (1 / n_N1[:, 0])).unsqueeze(1)
    # Decay of the remaining supply between token i's joining and token i + 1's (the last: to the end).
    next_NV = torch.cat([joined_NV[:, 1:], end_N1], 1)
    left_NV, ahead_NV = (t_NV - joined_NV).clamp(min=1e-300), (t_NV - next_NV).clamp(min=1e-300)
    decay_NV = torch.where(t_NV > joined_NV, (ahead_NV / left_NV).log(), 0.0)
    sums_NV = torch.where(tight_NV, 0.0, decay_NV).cumsum(1)
    before_NV = torch.cat([torch.zeros_like(n_N1), sums_NV[:, :-1]], 1)
    place_V = torch.arange(t_NV.shape[1], device=t_NV.device)
    start_NV = torch.where(starts_NV, place_V, 0).cummax(1).values
    base_NV = before_NV.gather(1, start_NV)
    segment_NV = starts_NV.long().cumsum(1) - 1
    met_N = tight_NV[:, -1] | (alpha_N >= 1 - 1e-15)
    threshold_N = torch.where(met_N, -torch.inf, sums_NV[:, -1] - base_NV[:, -1])
    back_NV = order_NV.argsort(1)
    return RaceTable(
        accepted_NV.gather(1, back_NV),
        (before_NV - base_NV).gather(1, back_NV),
        segment_NV.gather(1, back_NV),
        segment_NV[:, -1],
        threshold_N,
    )


def _join_points(
    accepted_NV: Tensor, q_NV: Tensor, t_NV: Tensor, reached_NV: Tensor, starts_NV: Tensor, n_N1: Tensor
) -> Tensor:
    """[N, V] s_i: Newton from 0, monotone, on 1 - (1 - s)^n = c_i + d_i s; the knot before where that is tight."""
    previous_NV = torch.cat([torch.zeros_like(n_N1), t_NV[:, :-1]], 1)
    slope_NV = torch.where(q_NV > 0, accepted_NV / torch.where(q_NV > 0, q_NV, 1.0), 0.0)
    offset_NV = reached_NV - slope_NV * t_NV
    s_NV = torch.zeros_like(t_NV)
    for _ in range(_NEWTON_STEPS):
        value_NV = 1 - (1 - s_NV) ** n_N1 - slope_NV * s_NV - offset_NV
        gain_NV = n_N1 * (1 - s_NV) ** (n_N1 - 1) - slope_NV
        usable_NV = (value_NV < 0) & (gain_NV > 0)
        step_NV = torch.where(usable_NV, -value_NV / torch.where(usable_NV, gain_NV, 1.0), 0.0)
        s_NV = torch.minimum(s_NV + step_NV, previous_NV)
    return torch.where(starts_NV, previous_NV, s_NV)


def weighted_race(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """The law of the emitted token given the drafts, the race itself integrated out."""
    table = race_table(target_NV, draft_NV, present_NK.sum(1).clamp(min=1))
    wins_NK = _win_probabilities(table, drafted_NK, present_NK)
    law_NV = torch.zeros_like(target_NV).scatter_add_(1, drafted_NK, wins_NK)
    residual_NV = normalised((target_NV - table.accepted_NV).clamp(min=0), target_NV)
    law_NV = law_NV + (1 - wins_NK.sum(1, keepdim=True)).clamp(min=0) * residual_NV
    return torch.where(present_NK.any(1, keepdim=True), law_NV, target_NV)


def _win_probabilities(table: RaceTable, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """[N, K] probability that each copy wins the race and is accepted.

    Copies in the best segment have keys w_k U_k. With weights sorted ascending and m of them, the winner's key
    has density sum_k (1/w_k) prod_{j != k} min(1, s/w_j): on (w_(i-1), w_(i)) every copy k >= i has the share
    s^(m-i) / prod_{j >= i} w_j.
    """
    last = table.last_segment_N.unsqueeze(1)
    segment_NK = torch.where(present_NK, table.segment_NV.gather(1, drafted_NK), last + 1)
    best_N1 = segment_NK.amin(1, keepdim=True)
    racing_NK = present_NK & (segment_NK == best_N1)
    log_weight_NK = torch.where(racing_NK, table.log_weight_NV.gather(1, drafted_NK), -torch.inf)
    sorted_NK, order_NK = log_weight_NK.sort(1)
    weight_NK = (sorted_NK - sorted_NK[:, -1:]).exp()
    threshold_N1 = torch.where(best_N1 < last, -torch.inf, table.log_threshold_N.unsqueeze(1))
    floor_N1 = (threshold_N1 - sorted_NK[:, -1:]).exp().clamp(max=1.0)
    upper_NK = torch.maximum(weight_NK, floor_N1)
    lower_NK = torch.cat([torch.zeros_like(floor_N1), weight_NK[:, :-1]], 1)
    lower_NK = torch.maximum(lower_NK, floor_N1)
    num_above = torch.arange(drafted_NK.shape[1], 0, -1, device=drafted_NK.device)
    # prod_{j >= i} (upper_i / w_j) and the same at the lower end: no overflow, every factor is at most 1.
    safe_NK = torch.where(weight_NK > 0, weight_NK, 1.0)
    log_tail_NK = safe_NK.log().flip(1).cumsum(1).flip(1)

    def integral(end_NK: Tensor) -> Tensor:
        positive_NK = torch.where(end_NK > 0, end_NK, 1.0)
        value_NK = (num_above * positive_NK.log() - log_tail_NK).exp() / num_above
        return torch.where(end_NK > 0, value_NK, 0.0)

    piece_NK = torch.where(weight_NK > 0, (integral(upper_NK) - integral(lower_NK)).clamp(min=0), 0.0)
    win_NK = torch.where(weight_NK > 0, piece_NK.cumsum(1), 0.0)
    return torch.zeros_like(win_NK).scatter_(1, order_NK, win_NK) * racing_NK
