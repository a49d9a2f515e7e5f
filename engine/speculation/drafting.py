"""Drafted chains, the laws they were drawn from, and the noise that decides about them.

A request's chains are the leaves of a tree: below every node some children are drawn together, by one of the draft
methods (`engine.rule_facts`), from the draft law below the node's prefix. In the usual tree only the root has several
children, and below its first token every chain goes on alone; with `iid` such chains are independent given the context,
which is what the block rules need. A chain *leads* a node when it is the first of the chains through it: rules that
look at nodes see every drawn node once, through its leader (equal tokens of different draws stay different nodes).
A row that does not speculate has one chain of length 0, so that it can be verified in one batch with rows that do. (A
step in which no row drafts draws its tokens directly: `engine.verifying`.)

Not for: running the draft model (`engine.drafters`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.sampling import fused
from engine.sampling.draw import categorical

MOST_LIKELY = "most_likely"
"""At temperature 0 nothing is drawn: the children are the most likely tokens by their logits."""


def children(method: str, weights_NV: Tensor, uniform_NK: Tensor) -> Tensor:
    """[N, K] K children below each node; deterministic in the weights and the noise.

    weights_NV: the draft law (for `most_likely`: anything that orders the tokens, such as logits).
    If fewer than K tokens have positive probability, the remaining children get a token whose probability in what is
    left of the law is 0; the method's rules recognise them by that. `greedy` and `spechub` children always differ from
    each other: their rules expect one node for each, and one draw below it.
    """
    num_children = uniform_NK.shape[1]
    if method == MOST_LIKELY:
        return weights_NV.topk(num_children, dim=1).indices
    if method == "iid" or num_children == 1:
        row_C = _parents(len(weights_NV), num_children, weights_NV.device)
        return fused.draw(weights_NV, row_C, uniform_NK.reshape(-1)).reshape(uniform_NK.shape)
    if method == "greedy":
        likeliest_NK = weights_NV.topk(num_children, dim=1).indices
        rest_NV = weights_NV.scatter(1, likeliest_NK[:, :-1], 0.0)
        return torch.cat([likeliest_NK[:, :-1], _drawn_or(rest_NV, uniform_NK[:, -1], likeliest_NK[:, -1])], 1)
    if method == "spechub":
        hub_N1 = weights_NV.argmax(1, keepdim=True)
        first_N1 = categorical(weights_NV, uniform_NK[:, 0]).unsqueeze(1)
        another_N = (hub_N1.squeeze(1) + 1) % weights_NV.shape[1]
        other_N1 = _drawn_or(weights_NV.scatter(1, hub_N1, 0.0), uniform_NK[:, 1], another_N)
        return torch.cat([first_N1, torch.where(first_N1 == hub_N1, other_N1, hub_N1)], 1)
    assert method == "without_replacement", method
    tokens = []
    for k in range(num_children):
        tokens.append(categorical(weights_NV, uniform_NK[:, k]))
        weights_NV = weights_NV.scatter(1, tokens[-1].unsqueeze(1), 0.0)
    return torch.stack(tokens, 1)


@cache
def _parents(num_parents: int, num_children: int, device: torch.device) -> Tensor:
    """[N * K] the parent of every child. Never forgotten, because recorded steps go on to read it where it is."""
    return torch.arange(num_parents, device=device).repeat_interleave(num_children)


def _drawn_or(weights_NV: Tensor, uniform_N: Tensor, otherwise_N: Tensor) -> Tensor:
    """[N, 1] a token drawn from each row, or `otherwise_N` where the row has no mass."""
    drawn_N = torch.where(weights_NV.sum(1) > 0, categorical(weights_NV, uniform_N), otherwise_N)
    return drawn_N.unsqueeze(1)


@dataclass(frozen=True)
class LawTable:
    """Laws along chains: which law row holds below the first i tokens of each chain.

    Chains share rows where their prefixes are equal; beyond a chain's length the row is any
    valid one and must not be used.
    """

    law_NV: Tensor
    row_CX: Tensor
    """[C, L] for draft laws, [C, L + 1] for target laws."""

    def rows(self, depth_C: Tensor) -> Tensor:
        """[C, V] the law below each chain's first `depth_C` tokens."""
        return self.law_NV[self.row_CX.gather(1, depth_C.unsqueeze(1)).squeeze(1)]

    def rows_at(self, depth: int) -> Tensor:
        """[C, V] the law below every chain's first `depth` tokens."""
        return self.law_NV[self.row_CX[:, depth]]

    def probability(self, depth_C: Tensor, token_C: Tensor) -> Tensor:
        """[C] float64 probability of `token_C` below each chain's first `depth_C` tokens."""
        row_C = self.row_CX.gather(1, depth_C.unsqueeze(1)).squeeze(1)
        return self.law_NV[row_C, token_C].double()

    def along(self, token_CL: Tensor) -> Tensor:
        """[C, L] float64 probability of every chain's tokens, each below those before it."""
        return self.law_NV[self.row_CX[:, : token_CL.shape[1]], token_CL].double()

    def select(self, index: Tensor) -> LawTable:
        """The laws of the chains at `index`."""
        return LawTable(self.law_NV, self.row_CX[index])


@dataclass(frozen=True)
class TargetShifts:
    """Pending changes of the target law (`target_shift.py`), M of them per chain, oldest first."""

    remaining_CM: Tensor
    """A shift holds at the nodes of depth below this (the root has depth 0); 0 pads."""
    state_CM4: Tensor
    """State at the root: float64."""
    num_chains_CM: Tensor

    def select(self, index: Tensor) -> TargetShifts:
        """The shifts of the chains at `index`."""
        return TargetShifts(self.remaining_CM[index], self.state_CM4[index], self.num_chains_CM[index])


@dataclass(frozen=True)
class Chains:
    """The drafted chains of a step, flat over requests: the chains of a request lie side by side, in order."""

    tokens_CL: Tensor
    """Drafted tokens; 0 beyond a chain's length."""
    length_C: Tensor
    request_C: Tensor
    """Which sampling row (0, 1, ...) a chain belongs to."""
    draft: LawTable
    """The laws the tokens were drawn from."""
    leads_CL: Tensor | None = None
    """Whether the chain is the first through its node of each depth; None where no two chains share a draw."""
    shifts: TargetShifts | None = None
    """Changes of the target law that earlier steps left behind, by chain; None where there are none."""
    shape: tuple[int, int] | None = None
    """(requests, most chains of one), where all of a step's requests are here and the host knows it."""

    @property
    def num_chains(self) -> int:
        """C."""
        return self.tokens_CL.shape[0]

    @property
    def max_length(self) -> int:
        """L, the longest chain."""
        return self.tokens_CL.shape[1]

    def select(self, index: Tensor, shape: tuple[int, int] | None = None) -> Chains:
        """The chains at `index`; requests keep their numbers. shape: of what is selected, where the host knows it."""
        return Chains(
            self.tokens_CL[index],
            self.length_C[index],
            self.request_C[index],
            self.draft.select(index),
            None if self.leads_CL is None else self.leads_CL[index],
            None if self.shifts is None else self.shifts.select(index),
            shape,
        )


@dataclass(frozen=True)
class ChainNoise:
    """The uniform numbers a rule consumes (float64), each used for one decision only."""

    accept_CL: Tensor
    residual_C: Tensor
    score_C: Tensor
    chosen_accept_CL: Tensor
    """For decisions about a chain that was chosen by the numbers above."""
    chosen_residual_C: Tensor

    def select(self, index: Tensor) -> ChainNoise:
        """The numbers of the chains at `index`."""
        return ChainNoise(
            self.accept_CL[index],
            self.residual_C[index],
            self.score_C[index],
            self.chosen_accept_CL[index],
            self.chosen_residual_C[index],
        )
