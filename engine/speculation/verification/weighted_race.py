"""The weighted race: the optimum alpha* for n i.i.d. drafts, in O(V log V).

Tokens are sorted by p/q descending. With t and P the cumulative q and p and F = 1 - (1 - t)^n, the
accepted mass per token is a = diff G, G = P + min(0, cummin(F - P)): the largest accepted masses
that n drafts can supply (`a(H) <= 1 - (1 - q(H))^n` for all sets H). Every draft k, of token x,
draws U_k. Tokens form segments: a place with F = G (tight) ends one. The draft in the first segment
and, in it, with the largest w_x U_k wins. It is accepted unless it lies beyond the point where all
needs are met; then the token is drawn from norm (p - a). `w` solves the supply balance token by
token: token i joins the race at s_i, the root of 1 - (1 - s)^n = c_i + d_i s, and until it joins,
the remaining supply of the other tokens decays by (t - s_{i+1})/(t - s_i). See
`docs/speculation-rules.md`.

The code uses complements: u = 1 - t, y = 1 - G and z = 1 - s, the root of z^n = y + d (z - u). Only
the weights from the first drafted token to the end of its segment matter. W is the largest number
of tokens that race in a row: others, with almost no mass in p or q, are never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_TIGHT, _TINY = 1e-13, 1e-300
_LEFT_OUT = 1e-12  # tokens below this over V never race: the rule stays lossless, alpha loses at most n times this
_NUM_STEPS = 5  # Newton steps: four leave 1e-11, which is the rounding at double roots
_BLOCK = 1 << 17  # entries the CPU works on at a time; beyond its cache, in fresh pages, rows take several times longer
_SORT_BITS, _RADIX_SORT_FROM = 30, 32_768  # torch sorts this many integers by radix, several times faster

Count = int | Tensor  # drafts per row: one number, or [N, 1] float64 if the rows differ


@dataclass(frozen=True)
class RaceTable:
    """Data of the race for every token; float64; suffix NW is by p/q, descending.

    place_NV is W for tokens that never race; need is a, unmet y after each place; supply is u
    before each place and, in its last column (Z = W + 1), after all; tight marks the end of a
    segment. The residual is p - a.
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
    count: Count = count_N.unsqueeze(1).double()
    if _is_read(count_N) and bool((count_N == count_N[0]).all()):
        count = int(count_N[0])
    token_NW, kept_N, residual_NV = _by_ratio(target_NV, draft_NV)
    need_NW, q_NW = target_NV.gather(1, token_NW), draft_NV.gather(1, token_NW)
    num_rows, width = q_NW.shape
    place_NW = torch.arange(width, dtype=torch.int32, device=q_NW.device).expand(num_rows, -1)
    if _known(kept_N.min(), 0) < width:
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
    # Past the last minimum everything is accepted.
    end = _known(last_NW[:, -1].max(), width - 1) + 1
    refused_NE = -reflected_NW[:, :end].diff(dim=1, prepend=torch.zeros_like(reflected_NW[:, :1]))
    refused_NE = torch.minimum(refused_NE, need_NW[:, :end])
    need_NW[:, :end].sub_(refused_NE)
    residual_NV.scatter_add_(1, token_NW[:, :end], refused_NE)
    place_NV = place_NW.new_full(target_NV.shape, width).scatter_(1, token_NW, place_NW)
    return RaceTable(target_NV, residual_NV, place_NV, q_NW, need_NW, unmet_NW, supply_NZ, tight_NW, count)


def _by_ratio(target_NV: Tensor, draft_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ([N, W] tokens by p/q descending, [N] number that race, [N, V] p of the rest)."""
    vocab_size = target_NV.shape[1]
    least_NV, lowest = torch.minimum(target_NV, draft_NV), _LEFT_OUT / vocab_size
    if _is_read(least_NV) and float(least_NV.min()) > lowest:
        kept_N = torch.full_like(least_NV[:, 0], vocab_size, dtype=torch.int64)
        return _sorted_by_ratio(target_NV, draft_NV, None, vocab_size), kept_N, torch.zeros_like(target_NV)
    races_NV = least_NV > lowest
    kept_N, left_out_NV = races_NV.sum(1), target_NV.masked_fill(races_NV, 0.0)
    width = max(_known(kept_N.max(), vocab_size), 1)
    if 4 * width > vocab_size:
        return _sorted_by_ratio(target_NV, draft_NV, races_NV, width), kept_N, left_out_NV
    token_NW = races_NV.to(torch.uint8).topk(width, dim=1).indices
    p_NW, q_NW, races_NW = (rows_NV.gather(1, token_NW) for rows_NV in (target_NV, draft_NV, races_NV))
    return token_NW.gather(1, _sorted_by_ratio(p_NW, q_NW, races_NW, width)), kept_N, left_out_NV


def _sorted_by_ratio(target_NV: Tensor, draft_NV: Tensor, races_NV: Tensor | None, width: int) -> Tensor:
    """Return [N, W] the first W columns by q/(p + q), ascending; others come last.

    On a CPU all rows are sorted as one list of 32-bit integers, and ties by the other bits. Tokens
    that share all bits differ by about 2^-50 of their masses' product.
    """
    num_rows, vocab_size = target_NV.shape
    share_NV = (target_NV + draft_NV).clamp_(min=_TINY)
    torch.div(draft_NV, share_NV, out=share_NV)
    if not _is_read(share_NV):
        assert races_NV is not None
        return share_NV.masked_fill_(~races_NV, 2.0).argsort(dim=1, stable=True)
    top = (1 << (_SORT_BITS - (num_rows - 1).bit_length())) - 1
    key_NV = share_NV.mul_(float(top - 1)).to(torch.int32)
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
    """Return rows and columns of true entries; numpy finds few faster than torch."""
    flat = mask_NW.reshape(-1)
    index_M = torch.from_numpy(np.flatnonzero(flat.numpy()))
    return index_M // mask_NW.shape[1], index_M % mask_NW.shape[1]


def _is_read(value: Tensor) -> bool:
    """Return whether the host reads numbers to save work; on a device it would wait."""
    return not value.is_cuda


def _known(value: Tensor, bound: int) -> int:
    """Return a number that saves work if the host reads it, otherwise its bound."""
    return int(value) if _is_read(value) else bound


def _power(base: Tensor, count: Count) -> Tensor:
    """Return base ** count; repeated multiplication is faster."""
    if isinstance(count, Tensor):
        return base**count
    if count < 2:
        return base.clone() if count else torch.ones_like(base)
    result = base * base
    if count > 3:
        result = _power(result, count // 2)
    return result.mul_(base) if count % 2 else result


def _join_points(slope_NW: Tensor, offset_NW: Tensor, count: Count) -> Tensor:
    """Return [N, W] z, the larger root of z^n = offset + slope z, by Newton's steps from above.

    The start is the lower of two bounds: the root for z = 1 on the right, and that of the parabola
    that touches z^n - slope z at its minimum, which is exact for n = 2 and approaches the root as
    it becomes a double one.
    """
    if isinstance(count, int) and count == 1:
        return (offset_NW / (1 - slope_NW).clamp_(min=_TINY)).clamp_(0.0, 1.0)
    z_NW = (offset_NW + slope_NW).clamp_(0.0, 1.0).pow_(1 / count)
    lowest_NW = (slope_NW / count).pow_(1 / (count - 1))
    height_NW = torch.addcmul(offset_NW, slope_NW, lowest_NW * ((count - 1) / count)).clamp_(min=0)
    bend_NW = _power(lowest_NW, count - 2).mul_(count * (count - 1) / 2)
    z_NW = torch.fmin(z_NW, lowest_NW.add_(height_NW.div_(bend_NW).sqrt_()))  # nan if n is 1
    for _ in range(0 if isinstance(count, int) and count == 2 else _NUM_STEPS):
        power_NW = _power(z_NW, count - 1)
        value_NW = z_NW.mul_(power_NW).mul_(count - 1).add_(offset_NW).abs_()
        z_NW = value_NW.div_(power_NW.mul_(count).sub_(slope_NW).clamp_(min=_TINY)).clamp_(max=1.0)
    return z_NW


def _weights(table: RaceTable, place_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([N, K] weight relative to the first draft's, [N, 1] least accepted key w U).

    place_NK: places of the drafts in order; those that do not race have weight 0.
    """
    width = table.tight_NW.shape[1]
    best_N1 = place_NK.amin(1, keepdim=True)
    low = min(_known(best_N1.min(), 0), width - 1)
    aligned = _known(best_N1.max(), width) == low
    place_R = torch.arange(low, width, device=place_NK.device)
    ends_NR = table.tight_NW[:, low:] if aligned else table.tight_NW[:, low:] & (place_R >= best_N1)
    end_N1 = ends_NR.view(torch.uint8).argmax(1, keepdim=True)
    has_end_N1 = ends_NR.gather(1, end_N1)
    end_N1 = torch.where(has_end_N1, end_N1 + low, width - 1)
    high = _known(end_N1.max(), width - 1) + 1
    supply_NR = table.supply_NZ[:, low + 1 : high + 1]
    slope_NR = table.need_NW[:, low:high] / table.draft_NW[:, low:high]
    offset_NR = torch.addcmul(table.unmet_NW[:, low:high], slope_NR, supply_NR, value=-1)
    at_N1 = best_N1.clamp(max=width - 1)
    starts_N1 = (at_N1 == 0) | table.tight_NW.gather(1, (at_N1 - 1).clamp(min=0))
    z_NR = _join_points(slope_NR, offset_NR, table.count)
    start_N1 = torch.where(starts_N1, table.supply_NZ.gather(1, at_N1), z_NR.gather(1, at_N1 - low))
    z_NR.scatter_(1, at_N1 - low, start_N1)
    unmet_N1 = table.unmet_NW[:, -1:].clamp(0.0, 1.0)
    # Decay of the supply between the start points of consecutive tokens; for the last one, up to
    # the end.
    decay_NR = torch.cat([z_NR[:, 1:], unmet_N1 ** (1 / table.count)], 1).sub_(supply_NR).clamp_(min=_TINY)
    decay_NR.div_(z_NR.sub_(supply_NR).clamp_(min=_TINY))
    if not aligned:
        decay_NR.masked_fill_(place_R[: high - low] < best_N1, 1.0)
    chain_NR = decay_NR.cumprod(1)
    weight_NK = chain_NR.gather(1, (place_NK - low - 1).clamp(0, high - low - 1))
    weight_NK = torch.where(place_NK == best_N1, 1.0, weight_NK)
    return weight_NK * (place_NK <= end_N1), torch.where(has_end_N1 | (unmet_N1 <= 1e-15), 0.0, chain_NR[:, -1:])


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

    Drafts have keys w_k U_k, the largest w is 1. With weights sorted ascending and m of them, the
    winner's key has density sum_k (1/w_k) prod_{j != k} min(1, s/w_j): on (w_(i-1), w_(i)) every
    draft k >= i has the share s^(m-i) / prod_{j >= i} w_j.
    """
    sorted_NK, order_NK = weight_NK.sort(1)
    upper_NK = torch.maximum(sorted_NK, floor_N1)
    lower_NK = torch.cat([floor_N1, upper_NK[:, :-1]], 1)
    num_above = torch.arange(weight_NK.shape[1], 0, -1, device=weight_NK.device)
    # prod_{j >= i} (upper_i / w_j) and the same at the lower end: no overflow, every factor is at
    # most 1.
    log_NK = torch.where(sorted_NK > 0, sorted_NK, 1.0).log()
    log_tail_NK = log_NK.flip(1).cumsum(1).flip(1)
    upper_NK, lower_NK = ((num_above * x_NK.log() - log_tail_NK).exp() / num_above for x_NK in (upper_NK, lower_NK))
    piece_NK = torch.where(sorted_NK > 0, (upper_NK - lower_NK).clamp(min=0), 0.0)
    win_NK = torch.where(sorted_NK > 0, piece_NK.cumsum(1), 0.0)
    return torch.zeros_like(win_NK).scatter_(1, order_NK, win_NK)
