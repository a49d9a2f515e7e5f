"""What a chain rule is, what it returns, and the residual all of them draw from.

On a device sums over and draws from laws are made from the tables as they are (`sampling.fused`); the rows they are
written with here are what that must agree with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling import fused
from engine.sampling.draw import categorical
from engine.speculation.drafting import ChainNoise, Chains, LawTable, Layers


@dataclass(frozen=True)
class ChainVerdict:
    """For each request: the chain that won, how much of it is accepted, and one token more."""

    chain_B: Tensor
    """Index of the winning chain in `Chains`."""
    accepted_B: Tensor
    """Accepted drafted tokens (tau)."""
    next_token_B: Tensor
    layers: Layers | None = None
    """Changes of the target law that hold after these tokens; None where there are none."""
    bias_B: Tensor | None = None
    """Distance from the target law that lossy acceptance allowed, summed over the positions it decided about."""


Verify = Callable[[Chains, LawTable, ChainNoise], ChainVerdict]


@dataclass(frozen=True)
class Rule:
    """A named verification rule."""

    name: str
    verify: Verify
    max_drafts: int | None = None
    """Most children of a node the rule can use; None is no limit."""
    draft_methods: tuple[str, ...] = ("iid",)
    """Draft methods for which the rule is exact; the first is its own."""
    trees: bool = False
    """Whether nodes below the root may have several children; else chains must be independent."""
    changes_targets: bool = False
    """Whether a step leaves changes of the targets of later positions behind (`layers.py`): then the draft law below a
    text must stay what it was, and no copied chains may come before the rule's own."""
    max_vocabulary: int | None = None
    """Largest vocabulary the rule can be computed for; None is no limit."""


def chain_table(chains: Chains) -> tuple[Tensor, Tensor]:
    """([B, K] the chains of each request in order, [B, K] whether there is one).

    Every request has a chain in column 0, whichever of its drafted chains are left; where there is none, chain 0 fills.
    """
    request_C = chains.request_C
    chain_C = torch.arange(chains.num_chains, device=request_C.device)
    begins_C = torch.ones_like(request_C, dtype=torch.bool)
    begins_C[1:] = request_C[1:] != request_C[:-1]
    number_C = begins_C.cumsum(0) - 1
    place_C = chain_C - torch.where(begins_C, chain_C, 0).cummax(0).values
    shape = chains.shape if chains.shape is not None else (int(number_C[-1]) + 1, int(place_C.max()) + 1)
    chain_BK = torch.zeros(shape, dtype=torch.int64, device=request_C.device)
    exists_BK = torch.zeros(shape, dtype=torch.bool, device=request_C.device)
    chain_BK[number_C, place_C] = chain_C
    exists_BK[number_C, place_C] = True
    return chain_BK, exists_BK


def surplus(target_CV: Tensor, draft_CV: Tensor, weight_C: Tensor) -> Tensor:
    """[C, V] the mass (weight * target - draft)+."""
    return (weight_C.unsqueeze(-1).to(target_CV.dtype) * target_CV - draft_CV).clamp_(min=0)


def surplus_sum(chains: Chains, target: LawTable, depth: int, weight_C: Tensor) -> Tensor:
    """[C] float64 sum of the surplus of the law below every chain's first `depth` tokens."""
    draft = chains.draft
    if fused.applies(target.law_NV):
        rows_C = target.row_CX[:, depth], draft.row_CX[:, depth]
        return fused.surplus(target.law_NV, rows_C[0], weight_C, draft.law_NV, rows_C[1]).sum()
    return surplus(target.rows_at(depth), draft.rows_at(depth), weight_C).sum(-1, dtype=torch.float64)


def draw_residual(chains: Chains, target: LawTable, accepted_C: Tensor, weight_C: Tensor, uniform_C: Tensor) -> Tensor:
    """[C] the token that follows the first `accepted_C` tokens of each chain, drawn from `residual`."""
    draft = chains.draft
    if not fused.applies(target.law_NV):
        return categorical(residual(chains, target, accepted_C, weight_C), uniform_C)
    target_row_C = target.row_CX.gather(1, accepted_C.unsqueeze(1)).squeeze(1)
    if chains.max_length == 0:
        return fused.surplus(target.law_NV, target_row_C).draw(uniform_C)
    within_C = accepted_C.clamp(max=chains.max_length - 1)
    draft_row_C = draft.row_CX.gather(1, within_C.unsqueeze(1)).squeeze(1)
    surplus_C = fused.surplus(target.law_NV, target_row_C, weight_C, draft.law_NV, draft_row_C)
    return surplus_C.draw(uniform_C, accepted_C < chains.length_C)


def residual(chains: Chains, target: LawTable, accepted_C: Tensor, weight_C: Tensor) -> Tensor:
    """[C, V] weights of the token that follows the first `accepted_C` tokens of each chain.

    The surplus of the weighted target law over the draft law; the target law itself after a
    whole chain, and where rounding leaves no surplus (target and draft agree, so that the branch
    has probability zero, but the draw must be defined).
    """
    target_CV = target.rows(accepted_C)
    if chains.max_length == 0:
        return target_CV
    stopped_C = accepted_C < chains.length_C
    draft_CV = chains.draft.rows(accepted_C.clamp(max=chains.max_length - 1))
    mass_CV = surplus(target_CV, draft_CV, weight_C)
    usable_C = stopped_C & (mass_CV.sum(-1) > 0)
    return torch.where(usable_C.unsqueeze(-1), mass_CV, target_CV)
