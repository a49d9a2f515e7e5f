"""Runs the passes of a head against its paged K/V, whose slots are the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.attention import AttentionMetadata
from engine.models.backend import Backend, TransformersBackend
from engine.models.heads.head import HeadOutput
from engine.models.runner import ModelRunner, Pass


class HeadBackend(Backend, Protocol):
    """Runs the passes of a head, whose rows read states in addition to their tokens."""

    def passed(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        wanted_N: Tensor,
        state_TH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run a flat pass; return the fields of a `HeadOutput` at the wanted rows."""


class TorchHead(TransformersBackend):
    """A head's own modules: every type, on any device. The oracle of the CPU's decoder."""

    def passed(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        wanted_N: Tensor,
        state_TH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run a flat pass."""
        state_NH = self._model(token_ids_T, state_TH, positions_T, metadata)[wanted_N]
        if not len(state_NH):
            return state_NH, state_NH.new_empty(0, self._model.config.draft_vocab_size)
        return state_NH, self._model.products(state_NH)

    def prepare(self, works: Callable[[], bool]) -> int:  # noqa: ARG002
        """Pack the weights of products."""
        num_bytes: int = self._model.pack()
        return num_bytes


class HeadRunner(ModelRunner):
    """Runner of a head in the place of a draft model."""

    backend: HeadBackend

    @property
    def head(self) -> Any:
        """The head."""
        return self.model

    @torch.inference_mode()
    def read(self, one: Pass, taps_TX: Tensor) -> HeadOutput:
        """Read rows of texts. taps_TX: the target's states."""
        return self.states(one, self.head.project(taps_TX))

    @torch.inference_mode()
    def states(self, one: Pass, state_TH: Tensor, drawn_M: Tensor | None = None) -> HeadOutput:
        """Run a pass.

        state_TH: inputs of the rows; drawn_M: tokens that only the device knows.
        """
        tensors = one.tensors
        ids_T = self.token_ids(tensors, drawn_M)
        return HeadOutput(*self.backend.passed(ids_T, tensors.positions_T, one.metadata, tensors.wanted_N, state_TH))

    @torch.inference_mode()
    def store(self, one: Pass, taps_TX: Tensor) -> None:
        """Store the K/V that a head of the DFlash types needs of texts. taps_TX: the target's states."""
        self.head.store(self.head.project(taps_TX), one.tensors.positions_T, one.metadata)

    @torch.inference_mode()
    def block(self, one: Pass, by_causality: dict[bool, AttentionMetadata]) -> Tensor:
        """Return [T, H] the states of all rows of whole blocks; by_causality: the pass's metadata by what its rows
        see.
        """
        tensors = one.tensors
        state_TH: Tensor = self.head.block(tensors.token_ids_T, tensors.positions_T, by_causality)
        return state_TH[tensors.wanted_N]

    def logits_of(self, output: HeadOutput) -> Tensor:
        """Return [N, V] float32 logits below rows with these outputs."""
        logits_NV: Tensor = self.head.in_target_tokens(self.head.scaled(output.product_NX), self.vocab_size)
        return logits_NV

    def _compute(
        self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor
    ) -> Tensor:
        """Return [N, V] logits of rows that read zeros, to measure the time of passes."""
        state_TH = torch.zeros(len(token_ids_T), self.head.config.hidden_size)
        return self.logits_of(HeadOutput(*self.backend.passed(token_ids_T, positions_T, metadata, wanted_N, state_TH)))
