"""What a chain rule is, what it returns, and the residual all of them draw from.

Where Triton kernels are used, `sampling.fused` sums laws and draws from them without gathering their rows. The plain
operations here are the reference for its results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import RuleFacts
from engine.sampling import fused
from engine.sampling.draw import categorical
from engine.speculation.drafting import ChainNoise, Chains, LawTable, TargetShifts
from engine.speculation.theory import Law, accept_token


@dataclass(frozen=True)
class ChainVerdict:
    """For each request: the chain that won, how much of it is accepted, and one token more."""

    chain_B: Tensor
    """Index of the winning chain in `Chains`."""
    accepted_B: Tensor
    """Accepted drafted tokens (tau)."""
    next_token_B: Tensor
    shifts: TargetShifts | None = None
    """Changes of the target law that hold after these tokens; None where there are none."""
    bias_B: Tensor | None = None
    """Distance from the target law that lossy acceptance allowed, summed over the positions it decided about."""


Verify = Callable[[Chains, LawTable, ChainNoise], ChainVerdict]


class NodeRule(Protocol):
    """The law of the emitted token given the drafts at N nodes."""

    def __call__(self, target_NV: Tensor, draft_NV: Tensor, drafted_NK: Tensor, present_NK: Tensor) -> Tensor:
        """[N, V] law of the emitted token, float64.

        drafted_NK: drafted tokens in the order they were drawn, duplicates included; those that exist come first.
        present_NK: which of them exist; a node without drafts emits from the target law.
        """


Acceptance = Callable[[Law, Law, int], float]
"""Probability that the first emitted token is a draft: of target law, draft law and number of drafts."""


class Rule(RuleFacts, frozen=True):
    """A verification rule: how it verifies, what it can be used for, and what is known of its acceptance."""

    name: str
    verify: Verify
    acceptance: Acceptance
    """In closed form at one position, or by enumeration; ValueError where that would take too long."""
    acceptance_of_one: Acceptance = accept_token
    """The same of a single draft."""
    closed_form_of: tuple[str, ...] | None = None
    """Draft methods for which the acceptance of several drafts has a closed form; None is all of them."""
    node_rule: NodeRule | None = None
    """Acceptance given the drafts at one node, where there is no closed form."""
    by_tiles: bool = False
    """Whether it runs on the kernels of `sampling.fused`, which keep one sum per tile instead of whole rows: its
    verification then needs little memory (`engine.verifying`)."""

    def has_closed_form(self, method: str, count: int) -> bool:
        """Whether the acceptance of `count` drafts is known without drawing them."""
        return count == 1 or self.closed_form_of is None or method in self.closed_form_of


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
    if fused.compiler_for(target.law_NV) == "Triton":
        rows_C = target.row_CX[:, depth], draft.row_CX[:, depth]
        return fused.surplus(target.law_NV, rows_C[0], weight_C, draft.law_NV, rows_C[1]).sum()
    return surplus(target.rows_at(depth), draft.rows_at(depth), weight_C).sum(-1, dtype=torch.float64)


def draw_residual(chains: Chains, target: LawTable, accepted_C: Tensor, weight_C: Tensor, uniform_C: Tensor) -> Tensor:
    """[C] the token that follows the first `accepted_C` tokens of each chain, drawn from `residual`."""
    draft = chains.draft
    if fused.compiler_for(target.law_NV) != "Triton":
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
