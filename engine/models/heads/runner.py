"""Runs the passes of a head against its paged K/V, whose slots are the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.attention.attention import AttentionMetadata
from engine.models.runner import ModelRunner, Pass


class HeadRunner(ModelRunner):
    """Runner of a head in the place of a draft model; its rows read states in addition to their tokens."""

    @property
    def head(self) -> Any:
        """The head."""
        return self.model

    def read(self, one: Pass, taps_TX: Tensor) -> Tensor:
        """Read rows of texts; return [N, H] the head's states at the wanted ones. taps_TX: the target's states."""
        return self._run(
            one, lambda ids, positions: self.head.read(ids, self.head.project(taps_TX), positions, one.metadata)
        )

    def states(self, one: Pass, state_TH: Tensor, drawn_M: Tensor | None = None) -> Tensor:
        """Return [N, H] the states of the wanted rows of a pass.

        state_TH: inputs of the rows; drawn_M: tokens that only the device knows.
        """
        return self._run(one, lambda ids, positions: self.head(ids, state_TH, positions, one.metadata), drawn_M)

    def block(self, one: Pass, by_causality: dict[bool, AttentionMetadata]) -> Tensor:
        """Return [T, H] the states of all rows of whole blocks; by_causality: the pass's metadata by what its rows
        see.
        """
        return self._run(one, lambda ids, positions: self.head.block(ids, positions, by_causality))

    def logits_of(self, state_NH: Tensor) -> Tensor:
        """Return [N, V] float32 logits below rows with these states."""
        return self.head.logits(state_NH, self.vocab_size)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _run(self, one: Pass, compute: Callable[[Tensor, Tensor], Tensor], drawn_M: Tensor | None = None) -> Tensor:
        """Return [N, H] the result of `compute` for tokens and positions, at the wanted rows."""
        computed_TH = compute(self.token_ids(one.tensors, drawn_M), one.tensors.positions_T)
        return computed_TH[one.tensors.wanted_N]
