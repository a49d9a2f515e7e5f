"""Operations with several implementations, and their data.

`torch_kernels.py` is the specification, in plain torch operations. `numba_kernels.py` (CPU) and `triton_kernels.py`
(CUDA) have the same operations in compiled form, and use the plain ones for unsupported inputs. `choosing.py` chooses
once, when the engine is built, and compares every operation with the specification.

To add an operation: a method here and in `TorchKernels`, inputs for it in `choosing.py`, and any compiled forms.
Not for: the passes of the models (`engine.models`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
KVMoves = Sequence[tuple[int, int]]
"""Slots (from, to) of a sequence."""


class Filters(NamedTuple):
    """Parameters of N rows' filters, by which unlikely tokens get no probability; None if a filter changes no row."""

    min_p_N: Tensor | None = None
    """Share of the most likely token's probability; 0 keeps all."""
    top_k_N: Tensor | None = None
    """Number of tokens; 0 keeps all."""
    top_p_N: Tensor | None = None
    """Mass of the most likely tokens that are kept; 1 keeps all."""
    most_k: int = 0
    """Upper bound of `top_k_N`, known on the host."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Filters:
        """Return the filters after a change of every tensor."""
        min_p, top_k, top_p = (None if one is None else change(one) for one in self[:3])
        return Filters(min_p, top_k, top_p, self.most_k)


class Kernels(Protocol):
    """Operations over rows of the vocabulary, over drafted chains, and over K/V."""

    by_tiles: bool
    """Whether operations work on tiles of a row. The rules `token`, `block` and `bv_race` then store a sum for each
    tile instead of whole rows. Filters read no number on the host, so CUDA graphs can record them, and sort no row.
    """

    def __hash__(self) -> int:
        """Compare kernels by identity."""

    def softmax(self, logits_NV: Tensor, temperature_N: Tensor, probs_NV: Tensor | None = None) -> Tensor:
        """Return [N, V] float32 distributions at positive temperatures; `probs_NV` (contiguous) is the output, if
        given.
        """

    def truncated(
        self, logits_NV: Tensor, temperature_N: Tensor, min_p_N: Tensor | None, top_k_N: Tensor | None, most_k: int
    ) -> Tensor:
        """Return [N, V] float32 distributions of the tokens that min-p and top-k keep, with ties at their edges.

        min-p drops tokens below this share of the most likely token's probability, at the temperature; 0 keeps all.
        top-k keeps the k most likely tokens; 0 keeps all. None: no row asks for the filter. most_k: no top-k is larger.
        """

    def distribution(
        self, logits_NV: Tensor, temperature_N: Tensor, filters: Filters, probs_NV: Tensor | None = None
    ) -> Tensor:
        """Return [N, V] float32 distributions at positive temperatures after min-p, top-k and top-p, in this order.

        Filters keep ties at their edges. probs_NV (contiguous) may be used as the output, if given.
        """

    def draw(self, probs_NV: Tensor, row_C: Tensor, uniform_C: Tensor) -> Tensor:
        """Return [C] a token from each of the rows, by the inverse of the cumulative sum."""

    def nucleus(self, probs_NV: Tensor, top_p_N: Tensor) -> Tensor:
        """Return [N, V] each row's smallest set of most likely tokens with mass >= top_p, with ties, normalised.

        A row with top_p of 1 or more is unchanged.
        """

    def surplus_sum(self, chains: Chains, target: ProbsTable, depth: int, weight_C: Tensor) -> Tensor:
        """Return [C] the float64 sum of (weight * target - draft)+ below every chain's first `depth` tokens."""

    def draw_residual(
        self, chains: Chains, target: ProbsTable, accepted_C: Tensor, weight_C: Tensor, uniform_C: Tensor
    ) -> Tensor:
        """Return [C] the token after the first `accepted_C` tokens of each chain, drawn from its residual.

        The residual is the surplus (weight * target - draft)+. After a whole chain, and without surplus, it is the
        target.
        """

    def race(self, chains: Chains, target: ProbsTable, noise: ChainNoise) -> ChainVerdict:
        """Verify every chain by block verification, and race those of each request (`torch_block.py`)."""

    def winners(self, chains: Chains, score_C: Tensor, accepted_C: Tensor, next_token_C: Tensor) -> ChainVerdict:
        """Return each request's chain with the smallest score (ties: the first), with its accepted length and next
        token.
        """

    def takes_logits(self, logits_NV: Tensor) -> bool:
        """Whether `decide` supports these logits and is faster than the separate operations."""

    def decide(
        self,
        logits_NV: Tensor,
        temperature_B: Tensor,
        filters: Filters,
        starts: Ints,
        chains: Chains,
        node_CX: Tensor,
        numbers: Tensor,
    ) -> tuple[Ints, Floats]:
        """Return ([3, B] chain, accepted length and next token of each request, [N + M] largest numbers), on the host.

        The verdict is that of `race` on `distribution` of the logits; at temperature 0 the longest match with the most
        likely tokens. The largest numbers show non-finite rows: the largest logit of each of N nodes, then one
        probability of each of M draft distributions. They are NaN if a logit was, and non-finite if a number of the
        model was. filters: of the B requests. starts: [B + 1] first row of each request's nodes, then N. node_CX: the
        node below the first i tokens of each chain. numbers: [6, C, L] as `engine.drafting.numbers.draw_numbers`
        returns them.
        """

    def move(self, storages: Sequence[Tensor], moves: Sequence[KVMoves]) -> None:
        """Move rows of contiguous [layers, slots, heads, dim] in place, by sequence.

        All rows of a sequence are read before any is written, and no two sequences share a slot.
        """


@dataclass(frozen=True)
class ProbsTable:
    """Distributions along chains: the distribution row below the first i tokens of each chain.

    Chains with equal prefixes share rows. Beyond a chain's length the row is valid but arbitrary, and must not be used.
    """

    probs_NV: Tensor
    row_CX: Tensor
    """[C, L] for draft distributions, [C, L + 1] for target distributions."""
    kernels: Kernels
    """Kernels for operations on these distributions."""

    def rows(self, depth_C: Tensor) -> Tensor:
        """Return [C, V] the distribution below each chain's first `depth_C` tokens."""
        return self.probs_NV[self.row_CX.gather(1, depth_C.unsqueeze(1)).squeeze(1)]

    def rows_at(self, depth: int) -> Tensor:
        """Return [C, V] the distribution below every chain's first `depth` tokens."""
        return self.probs_NV[self.row_CX[:, depth]]

    def probability(self, depth_C: Tensor, token_C: Tensor) -> Tensor:
        """Return [C] the float64 probability of `token_C` below each chain's first `depth_C` tokens."""
        row_C = self.row_CX.gather(1, depth_C.unsqueeze(1)).squeeze(1)
        return self.probs_NV[row_C, token_C].double()

    def along(self, token_CL: Tensor) -> Tensor:
        """Return [C, L] the float64 probability of every chain's tokens, each below those before it."""
        return self.probs_NV[self.row_CX[:, : token_CL.shape[1]], token_CL].double()

    def select(self, index: Tensor) -> ProbsTable:
        """Return the distributions of the chains at `index`."""
        return replace(self, row_CX=self.row_CX[index])


@dataclass(frozen=True)
class TargetShifts:
    """Pending changes of the target distribution (`target_shift.py`), M of them per chain, oldest first."""

    remaining_CM: Tensor
    """A shift holds at the nodes of depth below this (the root has depth 0); 0 pads."""
    state_CM4: Tensor
    """State (r, u, carry, gamma) at the root: float64."""
    num_chains_CM: Tensor
    """Number of chains of the block that caused the shift."""

    def select(self, index: Tensor) -> TargetShifts:
        """Return the shifts of the chains at `index`."""
        return TargetShifts(self.remaining_CM[index], self.state_CM4[index], self.num_chains_CM[index])


@dataclass(frozen=True)
class Chains:
    """Drafted chains of a step, flat over requests: the chains of a request are contiguous, in order."""

    tokens_CL: Tensor
    """Drafted tokens; 0 beyond a chain's length."""
    length_C: Tensor
    request_C: Tensor
    """Sampling row (0, 1, ...) of each chain."""
    draft: ProbsTable
    """Distributions from which the tokens were drawn."""
    leads_CL: Tensor | None = None
    """Whether the chain is the first through its node of each depth; None if no two chains share a draw."""
    shifts: TargetShifts | None = None
    """Changes of the target distribution by earlier steps, by chain; None if there are none."""
    shape: tuple[int, int] | None = None
    """(requests, most chains of one), if all of a step's requests are here and the host knows it."""

    @property
    def num_chains(self) -> int:
        """C."""
        return self.tokens_CL.shape[0]

    @property
    def max_length(self) -> int:
        """L, the longest chain."""
        return self.tokens_CL.shape[1]

    def select(self, index: Tensor, shape: tuple[int, int] | None = None) -> Chains:
        """Return the chains at `index`; requests keep their numbers. shape: shape of the selection, if the host
        knows it.
        """
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
    """Numbers for decisions about a chain that was chosen by the numbers above."""
    chosen_residual_C: Tensor

    def select(self, index: Tensor) -> ChainNoise:
        """Return the numbers of the chains at `index`."""
        return ChainNoise(
            self.accept_CL[index],
            self.residual_C[index],
            self.score_C[index],
            self.chosen_accept_CL[index],
            self.chosen_residual_C[index],
        )


@dataclass(frozen=True)
class ChainVerdict:
    """Result of each request: the selected chain, its accepted length, and one further token."""

    chain_B: Tensor
    """Index of the selected chain in `Chains`."""
    accepted_B: Tensor
    """Accepted drafted tokens (tau)."""
    next_token_B: Tensor
    shifts: TargetShifts | None = None
    """Changes of the target distribution that hold after these tokens; None if there are none."""
    bias_B: Tensor | None = None
    """Distance from the target distribution that lossy acceptance allowed, summed over the decided positions."""
