"""Runs the passes of a head against its paged K/V, whose slots are the target's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.execution.runner import ModelRunner, Pass
from engine.transfer import to_device


class HeadRunner(ModelRunner):
    """A head in the place of a draft model; its rows read states besides their tokens."""

    @property
    def head(self) -> Any:
        """The head."""
        return self.model

    @torch.inference_mode()
    def states(self, one: Pass, state_TH: Tensor, drawn_M: Tensor | None = None) -> Tensor:
        """[N, H] the states of the wanted rows of a pass.

        state_TH: what the rows read; drawn_M: tokens that the device alone knows.
        """
        batch = one.batch
        token_ids_T = self._token_ids(batch, drawn_M)
        if self._num_embeddings < self.vocab_size:
            token_ids_T = torch.where(token_ids_T < self._num_embeddings, token_ids_T, 0)
        positions_T = to_device(batch.positions_T, self.device)
        states_TH: Tensor = self.head(token_ids_T, state_TH, positions_T, one.metadata)
        return states_TH[to_device(batch.wanted_N, self.device)]

    @torch.inference_mode()
    def logits_of(self, state_NH: Tensor) -> Tensor:
        """[N, V] float32 logits below rows with these states."""
        return self.head.logits(state_NH, self.vocab_size)  # type: ignore[no-any-return]
