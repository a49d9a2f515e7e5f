"""K-SEQ (SpecTr, Sun et al. 2023): each i.i.d. draft passes with min(1, p(x)/(rho q(x))).

beta(rho) = sum min(q, p/rho); rho* in [1, n] solves 1 - (1 - beta)^n = rho beta (1 where the left
side is not larger there). Residual p - min(q, p/rho) (1 - (1 - beta)^n)/beta. Acceptance 1 - (1 -
beta)^n, which is never below recursive rejection sampling's and at least (1 - 1/e) of the optimum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.speculation.theory import Law
from engine.speculation.verification.node import at, normalised, point_mass, ratio

_BISECTIONS = 50


def kseq(target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
    """Emit the first draft that passes its test."""
    count_N = present_NK.sum(1).to(target_NV.dtype)
    rho_N = solve_rho(target_NV, draft_NV, count_N)
    accepted_NV = torch.minimum(draft_NV, target_NV / rho_N.unsqueeze(1))
    beta_N = accepted_NV.sum(1)
    probs_NV, remaining_N = torch.zeros_like(target_NV), torch.ones_like(target_NV[:, 0])
    for k in range(drafted_NK.shape[1]):
        token_N = drafted_NK[:, k]
        accept_N = ratio(at(target_NV, token_N), rho_N * at(draft_NV, token_N))
        accept_N = torch.where(present_NK[:, k], accept_N, 0.0)
        probs_NV = probs_NV + point_mass(token_N, remaining_N * accept_N, target_NV.shape[1])
        remaining_N = remaining_N * (1 - accept_N)
    share_N = torch.where(beta_N > 0, success(beta_N, count_N) / torch.where(beta_N > 0, beta_N, 1.0), 0.0)
    residual_NV = (target_NV - accepted_NV * share_N.unsqueeze(1)).clamp(min=0)
    return probs_NV + remaining_N.unsqueeze(1) * normalised(residual_NV, target_NV)


def success(beta_N: Tensor, count_N: Tensor) -> Tensor:
    """Return [N] 1 - (1 - beta)^n."""
    return 1 - (1 - beta_N.clamp(max=1.0)) ** count_N


def solve_rho(target_NV: Tensor, draft_NV: Tensor, count_N: Tensor) -> Tensor:
    """Return [N] rho* by bisection on [1, n]; always on the valid side (rho >= rho*)."""
    low_N, high_N = torch.ones_like(count_N), count_N.clamp(min=1.0)
    for _ in range(_BISECTIONS):
        middle_N = (low_N + high_N) / 2
        beta_N = torch.minimum(draft_NV, target_NV / middle_N.unsqueeze(1)).sum(1)
        too_small_N = success(beta_N, count_N) > middle_N * beta_N
        low_N = torch.where(too_small_N, middle_N, low_N)
        high_N = torch.where(too_small_N, high_N, middle_N)
    return high_N


def accept_kseq(p: Law, q: Law, n: int) -> float:
    """Return the acceptance of n i.i.d. drafts."""
    target_1V, draft_1V, count_1 = torch.from_numpy(p[None]), torch.from_numpy(q[None]), torch.tensor([float(n)])
    rho_11 = solve_rho(target_1V, draft_1V, count_1.double()).unsqueeze(1)
    return float(success(torch.minimum(draft_1V, target_1V / rho_11).sum(1), count_1))
