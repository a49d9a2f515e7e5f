"""Lossy verification of one chain: over-acceptance (Yin et al., NeurIPS 2024, Theorems 4 and 5).

A drafted token x is accepted with probability b(x) = min(1, (p(x) + eps)/q(x)), more often than
losslessly. After a rejection the token is drawn from norm (p - b q)+, which leaves the least bias
any residual can (`optimal`), or from p itself (`target`, for comparison: always worse). At one
position the law is then away from p by
  optimal: sum (b q - p)+      target: TV(b q + (1 - sum b q) p, p)
in total variation; the law of a whole answer by at most the expected sum over its positions. Not
lossless, so only on request, and only where the operator allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.draw import categorical
from engine.kernels.protocol import ChainNoise, Chains, ChainVerdict, ProbsTable
from engine.speculation.verification.node import at, normalised, ratio

Residual = Literal["optimal", "target"]


def accepted_mass(target_NV: Tensor, draft_NV: Tensor, epsilon: float) -> Tensor:
    """Return [N, V] b q = min(q, p + epsilon)."""
    return torch.minimum(draft_NV, target_NV + epsilon)


def redraw_law(target_NV: Tensor, mass_NV: Tensor, residual: Residual) -> Tensor:
    """Return [N, V] the law from which a rejected draft is replaced."""
    return target_NV if residual == "target" else normalised((target_NV - mass_NV).clamp(min=0), target_NV)


def position_bias(target_NV: Tensor, mass_NV: Tensor, redraw_NV: Tensor) -> Tensor:
    """Return [N] total variation between the law of the emitted token and the target law."""
    probs_NV = mass_NV + (1 - mass_NV.sum(1, keepdim=True)).clamp(min=0) * redraw_NV
    return (probs_NV - target_NV).clamp(min=0).sum(1)


@dataclass(frozen=True)
class OverAcceptance:
    """A chain rule for one chain per request."""

    epsilon: float
    """Increase of the target law when drafts are judged; above 0."""
    residual: Residual

    def __call__(self, chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
        """Accept up to the first rejection; the bias is summed over decided positions."""
        accepted_C = torch.zeros_like(chains.length_C)
        going_C = torch.ones_like(chains.length_C, dtype=torch.bool)
        bias_C = torch.zeros_like(noise.score_C)
        weights_CV = target.rows(chains.length_C).double()
        for depth in range(chains.max_length):
            decides_C = going_C & (depth < chains.length_C)
            target_CV, draft_CV = target.rows_at(depth).double(), chains.draft.rows_at(depth).double()
            mass_CV = accepted_mass(target_CV, draft_CV, self.epsilon)
            redraw_CV = redraw_law(target_CV, mass_CV, self.residual)
            bias_C = bias_C + torch.where(decides_C, position_bias(target_CV, mass_CV, redraw_CV), 0.0)
            token_C = chains.tokens_CL[:, depth]
            passes_C = noise.accept_CL[:, depth] < ratio(at(mass_CV, token_C), at(draft_CV, token_C))
            stops_C = decides_C & ~passes_C
            weights_CV = torch.where(stops_C.unsqueeze(1), redraw_CV, weights_CV)
            accepted_C, going_C = accepted_C + (decides_C & passes_C), going_C & ~stops_C
        next_token_C = categorical(weights_CV, noise.residual_C)
        return ChainVerdict(
            torch.arange(chains.num_chains, device=accepted_C.device), accepted_C, next_token_C, bias_B=bias_C
        )
