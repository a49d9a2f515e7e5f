"""Drafted chains, the laws they were drawn from, and the noise that decides about them.

The first tokens of a request's chains are drawn together, by one of DRAFT_METHODS; below its first token
every chain goes on alone, token by token from the draft law below its own prefix. With `iid` the
chains are independent given the context, which is what the block rules need.
A row that does not speculate has one chain of length 0: plain decoding is verification of
nothing, and needs no code of its own.

Not for: running the draft model (`engine.drafters`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.draw import categorical

DRAFT_METHODS = {
    "iid": "independent draws, duplicates and all",
    "without_replacement": "one after another, each token at most once",
    "greedy": "the most likely tokens, and one drawn from the rest",
    "spechub": "one draw, and the most likely token (or, when that was drawn, another draw)",
}
"""How the first tokens of a request's chains are drawn."""


def first_tokens(method: str, law_NV: Tensor, uniform_NK: Tensor) -> Tensor:
    """[N, K] the first tokens of K chains below each law; deterministic in the law and the noise.

    Where the law's support is smaller than K, surplus chains get an arbitrary token that the rules for the
    method recognise (its probability among what is left is 0).
    """
    num_chains = uniform_NK.shape[1]
    if method == "iid" or num_chains == 1:
        rows_NV = law_NV.repeat_interleave(num_chains, 0)
        return categorical(rows_NV, uniform_NK.reshape(-1)).reshape(uniform_NK.shape)
    if method == "greedy":
        top_NK = law_NV.topk(num_chains - 1, dim=1).indices
        rest_N1 = categorical(law_NV.scatter(1, top_NK, 0.0), uniform_NK[:, -1]).unsqueeze(1)
        return torch.cat([top_NK, rest_N1], 1)
    if method == "spechub":
        hub_N = law_NV.argmax(1)
        first_N = categorical(law_NV, uniform_NK[:, 0])
        other_N = categorical(law_NV.scatter(1, hub_N.unsqueeze(1), 0.0), uniform_NK[:, 1])
        return torch.stack([first_N, torch.where(first_N == hub_N, other_N, hub_N)], 1)
    assert method == "without_replacement", method
    tokens = []
    for k in range(num_chains):
        tokens.append(categorical(law_NV, uniform_NK[:, k]))
        law_NV = law_NV.scatter(1, tokens[-1].unsqueeze(1), 0.0)
    return torch.stack(tokens, 1)


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

    def select(self, index: Tensor) -> LawTable:
        """The laws of the chains at `index`."""
        return LawTable(self.law_NV, self.row_CX[index])


@dataclass(frozen=True)
class Chains:
    """The drafted chains of a step, flat over requests and sorted by request."""

    tokens_CL: Tensor
    """Drafted tokens; 0 beyond a chain's length."""
    length_C: Tensor
    request_C: Tensor
    """Which sampling row (0, 1, ...) a chain belongs to."""
    rank_C: Tensor
    """Index of the chain within its request."""
    draft: LawTable
    """The laws the tokens were drawn from."""

    @property
    def num_chains(self) -> int:
        """C."""
        return self.tokens_CL.shape[0]

    @property
    def max_length(self) -> int:
        """L, the longest chain."""
        return self.tokens_CL.shape[1]

    def select(self, index: Tensor) -> Chains:
        """The chains at `index`; requests keep their numbers."""
        return Chains(
            self.tokens_CL[index],
            self.length_C[index],
            self.request_C[index],
            self.rank_C[index],
            self.draft.select(index),
        )


@dataclass(frozen=True)
class ChainNoise:
    """The uniform numbers a rule consumes (float64), each used for one decision only."""

    accept_CL: Tensor
    residual_C: Tensor
    score_C: Tensor

    def select(self, index: Tensor) -> ChainNoise:
        """The numbers of the chains at `index`."""
        return ChainNoise(self.accept_CL[index], self.residual_C[index], self.score_C[index])
