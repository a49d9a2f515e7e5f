"""The weighted race: the optimum alpha* for n i.i.d. drafts, over the whole vocabulary, in O(V log V).

Tokens are sorted by p/q descending. With t and P the cumulative q and p and F = 1 - (1 - t)^n, the accepted
mass per token is a = diff G, G = P + min(0, cummin(F - P)): the largest accepted masses that n drafts can
supply (`a(H) <= 1 - (1 - q(H))^n` for all sets H). Every draft k, of token x, draws U_k. Tokens form segments: a place
with F = G (tight) ends one. The draft in the first segment and, in it, with the largest w_x U_k wins. It is accepted
unless it lies beyond the point where all needs are met; then the token is drawn from norm (p - a). `w` solves the
supply balance token by token: token i joins the race at s_i, the root of 1 - (1 - s)^n = c_i + d_i s, and until it
joins the others' remaining supply decays by (t - s_{i+1})/(t - s_i). See `docs/speculation-rules.md`.

The code uses complements: u = 1 - t, y = 1 - G and z = 1 - s, the root of z^n = y + d (z - u). Only the weights from
the first drafted token to the end of its segment matter. W is the largest number of tokens that race in a row: others,
with almost no mass in p or q, are never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_TIGHT, _TINY, _STRIDE, _MOST_STEPS = 1e-13, 1e-300, 64, 30
_LEFT_OUT = 1e-12  # tokens below this over V never race: the rule stays lossless, alpha loses at most n times this
_SETTLED = 1e-8  # after a Newton step below this over n the balance misses by (n step)^2 / 2 at most
_BLOCK = 1 << 17  # entries the CPU works on at a time; beyond its cache, in fresh pages, rows take several times longer
_SORT_BITS, _RADIX_SORT_FROM = 30, 32_768  # torch sorts this many integers by radix, several times faster

Count = int | Tensor  # drafts per row: one number, or [N] int64 if the rows differ


@dataclass(frozen=True)
class RaceTable:
    """Data of the race for every token; float64. Arrays with suffix NW are in order of p/q, descending.

    place_NV is W for tokens that never race; need is a, unmet y after each place; supply is u before each place and, in
    its last column (Z = W + 1), after all; tight marks the end of a segment. The residual is p - a.
    """

    target_NV: Tensor
    residual_NV: Tensor
    place_NV: Tensor
    draft_NW: Tensor
    need_NW: Tensor
    unmet_NW: Tensor
    supply_NZ: Tensor
    tight_NW: Tensor
    count: Count

    @property
    def accepted_NV(self) -> Tensor:  # noqa: N802
        """a: accepted mass by token."""
        return self.target_NV - self.residual_NV

    @property
    def alpha(self) -> Tensor:
        """[N] the optimum acceptance."""
        return self.accepted_NV.sum(1)


def race_table(target_NV: Tensor, draft_NV: Tensor, count_N: Tensor) -> RaceTable:
    """Build the table with one sort and one sweep; `count_N` drafts per row (at least 1)."""
    count: Count = int(count_N[0]) if bool((count_N == count_N[0]).all()) else count_N.long()
    token_NW, kept_N, residual_NV = _by_ratio(target_NV, draft_NV)
    need_NW, q_NW = target_NV.gather(1, token_NW), draft_NV.gather(1, token_NW)
    num_rows, width = q_NW.shape
    place_NW = torch.arange(width, dtype=torch.int32, device=q_NW.device).expand(num_rows, -1)
    if int(kept_N.min()) < width:
        void_NW = place_NW >= kept_N.unsqueeze(1)
        need_NW.masked_fill_(void_NW, 0.0)
        q_NW.masked_fill_(void_NW, _TINY)
        place_NW = place_NW.masked_fill(void_NW, width)
    supply_NZ = q_NW.new_ones((num_rows, width + 1))
    torch.neg(q_NW, out=supply_NZ[:, 1:])
    supply_NZ.cumsum_(1).clamp_(min=0)
    unmet_NW = need_NW.cumsum(1).neg_().add_(1.0)
    gap_NW = _power(supply_NZ[:, 1:], count)
    torch.sub(unmet_NW, gap_NW, out=gap_NW)
    lowest_NW, last_NW = gap_NW.cummin(1)
    reflected_NW = lowest_NW.clamp_(max=0)
    tight_NW = gap_NW.sub_(reflected_NW) <= _TIGHT
    unmet_NW.sub_(reflected_NW)
    end = int(last_NW[:, -1].max()) + 1  # past the last minimum everything is accepted
    refused_NE = -reflected_NW[:, :end].diff(dim=1, prepend=torch.zeros_like(reflected_NW[:, :1]))
    refused_NE = torch.minimum(refused_NE, need_NW[:, :end])
    need_NW[:, :end].sub_(refused_NE)
    residual_NV.scatter_add_(1, token_NW[:, :end], refused_NE)
    place_NV = place_NW.new_full(target_NV.shape, width).scatter_(1, token_NW, place_NW)
    return RaceTable(target_NV, residual_NV, place_NV, q_NW, need_NW, unmet_NW, supply_NZ, tight_NW, count)


def _by_ratio(target_NV: Tensor, draft_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ([N, W] tokens by p/q, descending, ending with some that do not race; [N] number that race; [N, V] p of
    those that do not).
    """
    vocab_size = target_NV.shape[1]
    least_NV, lowest = torch.minimum(target_NV, draft_NV), _LEFT_OUT / vocab_size
    if float(least_NV.min()) > lowest:
        kept_N = torch.full_like(least_NV[:, 0], vocab_size, dtype=torch.int64)
        return _sorted_by_ratio(target_NV, draft_NV, None, vocab_size), kept_N, torch.zeros_like(target_NV)
    races_NV = least_NV > lowest
    kept_N, left_out_NV = races_NV.sum(1), target_NV.masked_fill(races_NV, 0.0)
    width = max(int(kept_N.max()), 1)
    if 4 * width > vocab_size:
        return _sorted_by_ratio(target_NV, draft_NV, races_NV, width), kept_N, left_out_NV
    token_NW = races_NV.to(torch.uint8).topk(width, dim=1).indices
    p_NW, q_NW, races_NW = (rows_NV.gather(1, token_NW) for rows_NV in (target_NV, draft_NV, races_NV))
    return token_NW.gather(1, _sorted_by_ratio(p_NW, q_NW, races_NW, width)), kept_N, left_out_NV


def _sorted_by_ratio(target_NV: Tensor, draft_NV: Tensor, races_NV: Tensor | None, width: int) -> Tensor:
    """Return [N, W] the first W columns by q/(p + q), ascending; columns that do not race come last.

    All rows are sorted as one flat list of 32-bit integers; ties of these are then sorted by the other bits. Tokens
    that share all bits differ by about 2^-50 of their masses' product wherever it matters.
    """
    num_rows, vocab_size = target_NV.shape
    top = (1 << (_SORT_BITS - (num_rows - 1).bit_length())) - 1
    share_NV = (target_NV + draft_NV).clamp_(min=_TINY)
    torch.div(draft_NV, share_NV, out=share_NV).mul_(float(top - 1))
    key_NV = share_NV.to(torch.int32)
    if races_NV is not None:
        key_NV.masked_fill_(~races_NV, top)
    row_N1 = torch.arange(num_rows, device=key_NV.device).unsqueeze(1)
    flat = (key_NV.add_((row_N1 * (top + 1)).int()) if num_rows > 1 else key_NV).flatten()
    if _RADIX_SORT_FROM // 8 < len(flat) < _RADIX_SORT_FROM:
        flat = torch.cat([flat, flat.new_full((_RADIX_SORT_FROM - len(flat),), torch.iinfo(flat.dtype).max)])
    ordered_NW, index_NW = (x[: num_rows * vocab_size].view(num_rows, -1)[:, :width] for x in flat.sort(stable=True))
    row_M, column_M = _where(ordered_NW[:, 1:] == ordered_NW[:, :-1])
    if len(row_M):
        alike_NW = torch.zeros_like(index_NW, dtype=torch.bool)
        alike_NW[row_M, column_M] = alike_NW[row_M, column_M + 1] = True
        row_M, column_M = _where(alike_NW)
        index_M, key_M = index_NW[row_M, column_M], ordered_NW[row_M, column_M].long()
        rest_M = share_NV.flatten()[index_M].frac_().mul_(2.0**_SORT_BITS).long()
        index_NW[row_M, column_M] = index_M[((key_M << _SORT_BITS) + rest_M).sort(stable=True).indices]
    return index_NW - row_N1 * vocab_size if num_rows > 1 else index_NW


def _where(mask_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the true entries; numpy finds a few of them several times faster than torch."""
    flat = mask_NW.reshape(-1)
    found = flat.nonzero().squeeze(1) if flat.is_cuda else torch.from_numpy(np.flatnonzero(flat.numpy()))
    return found // mask_NW.shape[1], found % mask_NW.shape[1]


def _power(base: Tensor, count: Count) -> Tensor:
    """Return base ** count by repeated multiplication; a tensor `count` has one entry per row of `base`."""
    if isinstance(count, Tensor):
        result = torch.empty_like(base)
        for value in set(count.tolist()):
            result[count == value] = _power(base[count == value], value)
        return result
    if count < 2:
        return base.clone() if count else torch.ones_like(base)
    result = base * base
    if count > 3:
        result = _power(result, count // 2)
    return result.mul_(base) if count % 2 else result


@dataclass(frozen=True)
class _Balance:
    """z_i, the larger root of z^n = offset + slope z; one equation per entry."""

    slope_NW: Tensor
    offset_NW: Tensor
    count: Count

    @property
    def n(self) -> float | Tensor:
        return self.count.double().unsqueeze(1) if isinstance(self.count, Tensor) else float(self.count)

    def step(self, z_NW: Tensor) -> Tensor:
        """Return [N, W] after one Newton step: monotone from above; from too far below (no slope) back to 1."""
        power_NW, n = _power(z_NW, self.count - 1), self.n
        value_NW = (power_NW * z_NW).mul_(n - 1).add_(self.offset_NW).abs_()
        return value_NW.div_(power_NW.mul_(n).sub_(self.slope_NW).clamp_(min=_TINY)).clamp_(max=1.0)

    def moved(self, z_NW: Tensor, next_NW: Tensor) -> Tensor:
        return (next_NW - z_NW).abs_() > _SETTLED / self.n

    def solve(self) -> Tensor:
        """Return [N, W] the root, by Newton steps until nothing moves, from the upper bound that z <= 1 implies."""
        z_NW = (self.offset_NW + self.slope_NW).clamp_(0.0, 1.0).pow_(1 / self.n)
        for _ in range(_MOST_STEPS):
            before_NW, z_NW = z_NW, self.step(z_NW)
            if not bool(self.moved(before_NW, z_NW).any()):
                break
        return z_NW


def _join_points(balance: _Balance, first_N: Tensor, end_N: Tensor) -> Tensor:
    """Return [N, W] z_i, settled from column first_N to end_N.

    For n > 2 every 64th token is solved and the others are interpolated in d; two Newton steps from there leave few
    tokens unsettled, and these are solved individually.
    """
    slope_NW, offset_NW, count = balance.slope_NW, balance.offset_NW, balance.count
    if isinstance(count, int) and count <= 2:
        if count == 1:
            return (offset_NW / (1 - slope_NW).clamp_(min=_TINY)).clamp_(0.0, 1.0)
        half_NW = slope_NW / 2
        return torch.addcmul(offset_NW, half_NW, half_NW).clamp_(min=0).sqrt_().add_(half_NW).clamp_(0.0, 1.0)
    coarse = _Balance(slope_NW[:, ::_STRIDE].contiguous(), offset_NW[:, ::_STRIDE].contiguous(), count)
    coarse_z_NC = coarse.solve()
    num_blocks = coarse_z_NC.shape[1] - 1
    whole = num_blocks * _STRIDE
    z_NW = torch.empty_like(slope_NW)
    z_NW[:, whole:] = coarse_z_NC[:, -1:]
    if num_blocks:
        slope_NC1, z_NC1 = coarse.slope_NW.unsqueeze(2), coarse_z_NC.unsqueeze(2)
        z_NCS, slope_NCS = (x_NW[:, :whole].view(-1, num_blocks, _STRIDE) for x_NW in (z_NW, slope_NW))
        torch.sub(slope_NCS, slope_NC1[:, :-1], out=z_NCS)
        z_NCS.mul_(1 / slope_NC1.diff(dim=1).clamp_(max=-_TINY)).clamp_(0.0, 1.0)
        z_NCS.mul_(z_NC1.diff(dim=1)).add_(z_NC1[:, :-1])
    z_NW = balance.step(before_NW := balance.step(z_NW))
    row_M, column_M = _where(balance.moved(before_NW, z_NW))
    needed_M = (column_M >= first_N[row_M]) & (column_M <= end_N[row_M])
    row_M, column_M = row_M[needed_M], column_M[needed_M]
    if len(row_M):
        slope_M1, offset_M1 = (x_NW[row_M, column_M].unsqueeze(1) for x_NW in (slope_NW, offset_NW))
        open_ = _Balance(slope_M1, offset_M1, count[row_M] if isinstance(count, Tensor) else count)
        z_NW[row_M, column_M] = open_.solve().squeeze(1)
    return z_NW


def _weights(table: RaceTable, place_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([N, K] weight relative to that of the first draft in the order, 0 for drafts that do not race; [N, 1] the
    smallest key w U that is accepted).

    place_NK: places of the drafts in the order.
    """
    width = table.tight_NW.shape[1]
    best_N1 = place_NK.amin(1, keepdim=True)
    low = min(int(best_N1.min()), width - 1)
    aligned = int(best_N1.max()) == low
    place_R = torch.arange(low, width, device=place_NK.device)
    ends_NR = table.tight_NW[:, low:] if aligned else table.tight_NW[:, low:] & (place_R >= best_N1)
    end_N1 = ends_NR.view(torch.uint8).argmax(1, keepdim=True)
    found_N1 = ends_NR.gather(1, end_N1)
    end_N1 = torch.where(found_N1, end_N1 + low, width - 1)
    high = int(end_N1.max()) + 1
    supply_NR = table.supply_NZ[:, low + 1 : high + 1]
    slope_NR = table.need_NW[:, low:high] / table.draft_NW[:, low:high]
    offset_NR = torch.addcmul(table.unmet_NW[:, low:high], slope_NR, supply_NR, value=-1)
    at_N1 = best_N1.clamp(max=width - 1)
    starts_N1 = (at_N1 == 0) | table.tight_NW.gather(1, (at_N1 - 1).clamp(min=0))
    first_N = (best_N1 + starts_N1.long() - low).squeeze(1)
    balance = _Balance(slope_NR, offset_NR, table.count)
    z_NR = _join_points(balance, first_N, end_N1.squeeze(1) - low)
    start_N1 = torch.where(starts_N1, table.supply_NZ.gather(1, at_N1), z_NR.gather(1, at_N1 - low))
    z_NR.scatter_(1, at_N1 - low, start_N1)
    unmet_N1 = table.unmet_NW[:, -1:].clamp(0.0, 1.0)
    # Decay of the supply between the start points of consecutive tokens; for the last one, up to the end.
    decay_NR = torch.cat([z_NR[:, 1:], unmet_N1 ** (1 / balance.n)], 1).sub_(supply_NR).clamp_(min=_TINY)
    decay_NR.div_(z_NR.sub_(supply_NR).clamp_(min=_TINY))
    if not aligned:
        decay_NR.masked_fill_(place_R[: high - low] < best_N1, 1.0)
    chain_NR = decay_NR.cumprod(1)
    weight_NK = chain_NR.gather(1, (place_NK - low - 1).clamp(0, high - low - 1))
    weight_NK = torch.where(place_NK == best_N1, 1.0, weight_NK)
    return weight_NK * (place_NK <= end_N1), torch.where(found_N1 | (unmet_N1 <= 1e-15), 0.0, chain_NR[:, -1:])


def weighted_race(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """Return the law of the emitted token given the drafts, with the race itself integrated out."""
    num_rows, vocab_size = target_NV.shape
    size = max(1, num_rows if target_NV.is_cuda else _BLOCK // vocab_size)
    blocks = [slice(start, start + size) for start in range(0, num_rows, size)]
    laws = [_emitted_law(target_NV[i], draft_NV[i], drafted_NK[i], present_NK[i]) for i in blocks]
    return torch.cat(laws or [target_NV]) if len(laws) != 1 else laws[0]


def _emitted_law(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    table = race_table(target_NV, draft_NV, present_NK.sum(1).clamp(min=1))
    place_NK = table.place_NV.gather(1, drafted_NK).long().masked_fill_(~present_NK, table.tight_NW.shape[1])
    wins_NK = _win_probabilities(*_weights(table, place_NK))
    missed_N1 = (1 - wins_NK.sum(1, keepdim=True)).clamp(min=0)
    probs_NV = table.residual_NV
    total_N1 = probs_NV.sum(1, keepdim=True)
    usable_N1 = present_NK.any(1, keepdim=True) & (total_N1 > 0)
    probs_NV.mul_(torch.where(usable_N1, missed_N1 / total_N1, 0.0))
    probs_NV.addcmul_(target_NV, torch.where(usable_N1, 0.0, missed_N1))
    return probs_NV.scatter_add_(1, drafted_NK, wins_NK)


def _win_probabilities(weight_NK: Tensor, floor_N1: Tensor) -> Tensor:
    """Return [N, K] the probability that each draft wins the race and is accepted.

    Drafts have keys w_k U_k, the largest w is 1. With weights sorted ascending and m of them, the winner's key
    has density sum_k (1/w_k) prod_{j != k} min(1, s/w_j): on (w_(i-1), w_(i)) every draft k >= i has the share
    s^(m-i) / prod_{j >= i} w_j.
    """
    sorted_NK, order_NK = weight_NK.sort(1)
    upper_NK = torch.maximum(sorted_NK, floor_N1)
    lower_NK = torch.cat([floor_N1, upper_NK[:, :-1]], 1)
    num_above = torch.arange(weight_NK.shape[1], 0, -1, device=weight_NK.device)
    # prod_{j >= i} (upper_i / w_j) and the same at the lower end: no overflow, every factor is at most 1.
    log_NK = torch.where(sorted_NK > 0, sorted_NK, 1.0).log()
    log_tail_NK = log_NK.flip(1).cumsum(1).flip(1)
    upper_NK, lower_NK = ((num_above * x_NK.log() - log_tail_NK).exp() / num_above for x_NK in (upper_NK, lower_NK))
    piece_NK = torch.where(sorted_NK > 0, (upper_NK - lower_NK).clamp(min=0), 0.0)
    win_NK = torch.where(sorted_NK > 0, piece_NK.cumsum(1), 0.0)
    return torch.zeros_like(win_NK).scatter_(1, order_NK, win_NK)
