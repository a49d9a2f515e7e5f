"""Data that kernels (`torch_kernels.Kernels`) and verification rules take and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:
    from engine.kernels.torch_kernels import Kernels

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
KVMoves = Sequence[tuple[int, int]]
"""(from, to)."""


class Filters(NamedTuple):
    """Parameters of N rows' filters, which give unlikely tokens no probability.

    None if a filter changes no row.
    """

    min_p_N: Tensor | None = None
    """Share of the largest probability; 0 keeps all."""
    top_k_N: Tensor | None = None
    """Number of tokens; 0 keeps all."""
    top_p_N: Tensor | None = None
    """Mass of the likeliest tokens; 1 keeps all."""
    most_k: int = 0
    """Upper bound of `top_k_N`, known on the host."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Filters:
        """Return the filters after a change of every tensor."""
        min_p, top_k, top_p = (None if value is None else change(value) for value in self[:3])
        return Filters(min_p, top_k, top_p, self.most_k)


@dataclass(frozen=True)
class ProbsTable:
    """Distributions along chains: the distribution row below the first i tokens of each chain.

    Chains with equal prefixes share rows. Beyond a chain's length the row is valid but arbitrary,
    and must not be used.
    """

    probs_NV: Tensor
    row_CX: Tensor
    """[C, L] for drafts, [C, L + 1] for the target."""
    kernels: Kernels

    def rows(self, depth_C: Tensor) -> Tensor:
        """Return [C, V] the distribution below each chain's first `depth_C` tokens."""
        return self.probs_NV[self.row_CX.gather(1, depth_C.unsqueeze(1)).squeeze(1)]

    def rows_at(self, depth: int) -> Tensor:
        """Return [C, V] the distribution below every chain's first `depth` tokens."""
        return self.probs_NV[self.row_CX[:, depth]]

    def probability(self, depth_C: Tensor, token_C: Tensor) -> Tensor:
        """Return [C] the float64 probability of `token_C` below the first `depth_C` tokens."""
        row_C = self.row_CX.gather(1, depth_C.unsqueeze(1)).squeeze(1)
        return self.probs_NV[row_C, token_C].double()

    def along(self, token_CL: Tensor) -> Tensor:
        """Return [C, L] the float64 probability of each token after those before it."""
        return self.probs_NV[self.row_CX[:, : token_CL.shape[1]], token_CL].double()

    def select(self, index: Tensor) -> ProbsTable:
        return replace(self, row_CX=self.row_CX[index])


@dataclass(frozen=True)
class TargetShifts:
    """Pending changes of the target (`target_shift.py`), M of them per chain, oldest first."""

    remaining_CM: Tensor
    """A shift holds at nodes of smaller depth (the root has 0); 0 pads."""
    state_CM4: Tensor
    """State (r, u, carry, gamma) at the root, float64."""
    num_chains_CM: Tensor
    """Chains of the block that caused the shift."""

    def select(self, index: Tensor) -> TargetShifts:
        return TargetShifts(self.remaining_CM[index], self.state_CM4[index], self.num_chains_CM[index])


@dataclass(frozen=True)
class Chains:
    """Drafted chains of a step, contiguous by request."""

    tokens_CL: Tensor
    """0 beyond a chain's length."""
    length_C: Tensor
    request_C: Tensor
    """Sampling row (0, 1, ...) of each chain."""
    draft: ProbsTable
    """Distributions from which the tokens were drawn."""
    shape: tuple[int, int]
    """(requests, most chains of a request)."""
    leads_CL: Tensor | None = None
    """Whether a chain is the first through its node; None if no draw is shared."""
    shifts: TargetShifts | None = None
    """Changes of the target by earlier steps, by chain."""

    @property
    def num_chains(self) -> int:
        return self.tokens_CL.shape[0]

    @property
    def max_length(self) -> int:
        return self.tokens_CL.shape[1]

    def select(self, index: Tensor, shape: tuple[int, int]) -> Chains:
        """Return the chains at `index`; requests keep their numbers.

        shape: of the selection.
        """
        return Chains(
            self.tokens_CL[index],
            self.length_C[index],
            self.request_C[index],
            self.draft.select(index),
            shape,
            None if self.leads_CL is None else self.leads_CL[index],
            None if self.shifts is None else self.shifts.select(index),
        )


@dataclass(frozen=True)
class ChainNoise:
    """The uniform numbers a rule consumes (float64), each used for one decision only."""

    accept_CL: Tensor
    residual_C: Tensor
    score_C: Tensor
    chosen_accept_CL: Tensor
    """Numbers for decisions about a chain that the numbers above chose."""
    chosen_residual_C: Tensor

    @staticmethod
    def of(numbers: Tensor, length: int) -> ChainNoise:
        """Return views of `engine.drafting.numbers.draw_numbers`, for chains up to `length`."""
        _, accept, chosen_accept, residual, score, chosen_residual = numbers
        return ChainNoise(
            accept[:, :length],
            residual[:, 0],
            score[:, 0],
            chosen_accept[:, :length],
            chosen_residual[:, 0],
        )

    def select(self, index: Tensor) -> ChainNoise:
        return ChainNoise(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True)
class TextNodes:
    """Nodes of text drafts among the N nodes of a step, on the host."""

    parent_N: Ints
    """Node above, counted from the request's root; -1 for nodes of no text draft."""
    token_N: Ints
    number_BL: Floats
    """Numbers that decide about the children at each depth."""

    @staticmethod
    def none(num_nodes: int, num_requests: int) -> TextNodes:
        """Return the arrays of a step without text drafts."""
        return TextNodes(
            parent_N=np.full(num_nodes, -1),
            token_N=np.zeros(num_nodes, np.int64),
            number_BL=np.zeros((num_requests, 0)),
        )


@dataclass(frozen=True)
class ChainVerdict:
    """Result of each request: the selected chain, its accepted length, and one further token."""

    chain_B: Tensor
    """Index in `Chains`."""
    accepted_B: Tensor
    """Accepted drafted tokens (tau)."""
    next_token_B: Tensor
    shifts: TargetShifts | None = None
    """Changes of the target after these tokens, or None."""
    bias_B: Tensor | None = None
    """Distance from the target by lossy acceptance, summed over decided positions."""


@dataclass(frozen=True)
class RecurrentSteps:
    """Steps of the recurrent layers of a pass: M tokens of B sequences, parents first."""

    steps: Ints
    """[6, M] Input, source, node, row and two places of each step, or -1.

    input: number of the token's inputs; source: node whose state the step starts from, -1 is the
    text's; node: of the token, -1 for a token of the text; row: of the output; places: where the
    state after the step is stored.
    """
    begins: Ints
    """[B + 1] First step of each sequence, and the number of steps."""
    first_states: Ints
    """[B] Place of the state before the first step; -1 for zeros."""
    on_device: dict[Any, Any] = field(default_factory=dict)
    """Operands that a device's kernel has made of the steps, for all layers of the pass."""
