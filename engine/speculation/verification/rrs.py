"""Recursive rejection sampling: with replacement (SpecInfer) and without (RSD, Sequoia).

With replacement, drafts i.i.d. from q: p_1 = p; draft k is accepted with probability
min(1, p_k(x_k)/q(x_k)), else p_{k+1} = norm (p_k - q)+; after the last rejection the token is drawn
from p_{n+1}. Acceptance sum min(p, S_n q) with S_1 = 1, S_{j+1} = S_j + 1 - sum min(p, S_j q).
Every duplicate must be tested (it is rejected) and update the residual; skipping it is biased.

Without replacement, drafts ordered: the same with q_{k+1} = norm (q_k without x_k). The distinct
tokens of i.i.d. draws in order of first appearance are such drafts, so here duplicates are skipped.

Naive sampling (SpecInfer's "naive", NSS) draws from the target and checks whether the token was
drafted. It is exact for any drafts, including deterministic ones. Acceptance for i.i.d. drafts: sum
p (1 - (1 - q)^n).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.speculation.verification.node import at, normalised, point_mass, ratio


def nss(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:  # noqa: ARG001
    """Return the target law for any drafts."""
    return target_NV


def rrs(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """Verify drafts with replacement, all from the same law."""
    return _recursive(target_NV, draft_NV, drafted_NK, present_NK, replaces=True)


def rrs_without_replacement(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """Verify distinct drafts in the order they were drawn; a token drawn again is skipped."""
    return _recursive(target_NV, draft_NV, drafted_NK, present_NK, replaces=False)


def _recursive(target_NV: Tensor, left_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor, replaces: bool) -> Tensor:
    """Test the drafts one after another; left_NV: law of the next draft."""
    probs_NV, remaining_N = torch.zeros_like(target_NV), torch.ones_like(target_NV[:, 0])
    residual_NV = target_NV
    for token_N, present_N in zip(drafted_NK.unbind(1), present_NK.unbind(1), strict=True):
        tested_N = present_N if replaces else present_N & (at(left_NV, token_N) > 0)
        accept_N = torch.where(tested_N, ratio(at(residual_NV, token_N), at(left_NV, token_N)), 0.0)
        probs_NV = probs_NV + point_mass(token_N, remaining_N * accept_N, target_NV.shape[1])
        remaining_N = remaining_N * (1 - accept_N)
        reduced_NV = normalised((residual_NV - left_NV).clamp(min=0), residual_NV)
        residual_NV = torch.where(tested_N.unsqueeze(1), reduced_NV, residual_NV)
        if not replaces:
            without_NV = left_NV.scatter(1, token_N.unsqueeze(1), 0.0)
            left_NV = torch.where(tested_N.unsqueeze(1), normalised(without_NV, without_NV), left_NV)
    return probs_NV + remaining_N.unsqueeze(1) * residual_NV
