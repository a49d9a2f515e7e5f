"""Greedy multi-draft verification (Hu et al., ICLR 2025, section 5) and SpecHub.

Greedy drafts: the n - 1 most likely tokens of q, then one x drawn from qt = norm (q without them).
Accept x with probability min(1, p(x)/qt(x)), else draw from norm (p - qt)+ over the whole
vocabulary; a token among the n - 1 counts as accepted. Attains the optimum of its draft law, p(Top)
+ sum_{x not in Top} min(p, qt), in O(V) for any n.

SpecHub (Sun et al., 2024), n = 2: with a = argmax q, the pair is (x, a) with x ~ q, or (a, x) if x
= a and then x ~ q without a. As a set it has the law of greedy drafts with n = 2. So it is verified
as such, with the same acceptance as by SpecHub's transport plan, which is the optimum, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.speculation.verification.node import at, normalised, point_mass, ratio


def greedy(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """Verify greedy drafts: the last present one was drawn, the others are most likely."""
    place_K = torch.arange(drafted_NK.shape[1], device=drafted_NK.device)
    last_N = torch.where(present_NK, place_K, 0).amax(1)
    rest_NV = draft_NV
    for k in range(drafted_NK.shape[1]):
        is_top_N1 = (present_NK[:, k] & (k < last_N)).unsqueeze(1)
        rest_NV = torch.where(is_top_N1, rest_NV.scatter(1, drafted_NK[:, k : k + 1], 0.0), rest_NV)
    rest_NV = normalised(rest_NV, torch.zeros_like(rest_NV))
    token_N = drafted_NK.gather(1, last_N.unsqueeze(1)).squeeze(1)
    accept_N = ratio(at(target_NV, token_N), at(rest_NV, token_N))
    residual_NV = normalised((target_NV - rest_NV).clamp(min=0), target_NV)
    probs_NV = point_mass(token_N, accept_N, target_NV.shape[1]) + (1 - accept_N).unsqueeze(1) * residual_NV
    # Without a drawn token (no drafts, or no mass outside Top) the target law is emitted unchanged.
    drawn_N1 = (present_NK.any(1) & (rest_NV.sum(1) > 0)).unsqueeze(1)
    return torch.where(drawn_N1, probs_NV, target_NV)


def spechub(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """Verify {a, x}, with a most likely, in any order as greedy drafts; or a single draft."""
    if drafted_NK.shape[1] > 1:
        is_hub_last_N1 = (present_NK[:, 1] & (drafted_NK[:, 1] == draft_NV.argmax(1))).unsqueeze(1)
        pair_N2 = torch.where(is_hub_last_N1, drafted_NK[:, :2].flip(1), drafted_NK[:, :2])
        drafted_NK = torch.cat([pair_N2, drafted_NK[:, 2:]], 1)
    return greedy(target_NV, draft_NV, drafted_NK, present_NK)
