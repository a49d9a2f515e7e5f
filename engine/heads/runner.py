"""Runs the passes of a head against its paged K/V, whose slots are the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.attention import AttentionMetadata
from engine.attention.inputs import NodeInput
from engine.heads.head import HeadOutput
from engine.models.backend import Backend, TransformersBackend
from engine.models.runner import ModelRunner, Pass

_NO_ROWS = torch.zeros(0, dtype=torch.int64)


class Reading(NamedTuple):
    """Texts that a head of the DFlash types reads."""

    one: Pass
    taps_TX: Tensor
    """The target's states before its rows; a backend may overwrite them."""


class HeadBackend(Backend):
    """Runs the passes of a head, whose rows read states in addition to their tokens."""

    def passed(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        wanted_N: Tensor,
        state_TX: Tensor | None,
        are_target_states: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run a flat pass; return the fields of a `HeadOutput` at the wanted rows.

        are_target_states: whether the head projects the states; a backend may overwrite them.
        """
        raise NotImplementedError

    def block(self, reading: Reading | None, blocks: Sequence[Pass], rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Read texts and compute blocks after them; return fields of a `HeadOutput`.

        For DFlash types. blocks: a pass for each of `BlockConfig.causalities`, or none.
        """
        raise NotImplementedError

    def term(self, memory_NR: Tensor) -> Tensor:
        """Return [N, draft vocabulary] the term below tokens, from their embeddings.

        After a pass of a DSpark head whose term depends on embeddings alone.
        """
        raise NotImplementedError


class TorchHead(TransformersBackend, HeadBackend):
    """A head's own modules: every type, on any device. The oracle of the CPU's decoder."""

    def passed(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        wanted_N: Tensor,
        state_TX: Tensor | None,
        are_target_states: bool,
    ) -> tuple[Tensor, Tensor]:
        state_TH = state_TX
        if are_target_states:
            state_TH = self._model.project(state_TX)
        return self._output(self._model(token_ids_T, state_TH, positions_T, metadata)[wanted_N])

    def block(self, reading: Reading | None, blocks: Sequence[Pass], rows_N: Tensor) -> tuple[Tensor, Tensor]:
        head = self._model
        if reading is not None:
            prepared, taps_TX = reading
            head.store(head.project(taps_TX), prepared.tensors.positions_T, prepared.metadata)
        if not blocks:
            return self._output(torch.empty((0, head.config.hidden_size), device=head.device))
        metadata = [block.metadata for block in blocks]
        by_causality = dict(zip(head.block_config.causalities, metadata, strict=True))
        tensors = blocks[0].tensors
        state_TH = head.block(tensors.token_ids_T, tensors.positions_T, by_causality)
        return self._output(state_TH[rows_N])

    def term(self, memory_NR: Tensor) -> Tensor:
        term_NX: Tensor = self._model.markov_head.markov_w2(memory_NR)
        return term_NX

    def _output(self, state_NH: Tensor) -> tuple[Tensor, Tensor]:
        if not len(state_NH):
            return state_NH, state_NH.new_empty(0, self._model.config.draft_vocab_size)
        return state_NH, self._model.products(state_NH)


class HeadRunner(ModelRunner):
    """Runner of a head in the place of a draft model."""

    backend: HeadBackend

    @property
    def head(self) -> Any:
        return self.model

    @torch.inference_mode()
    def read(self, prepared: Pass, taps_TX: Tensor) -> HeadOutput:
        """Read rows of texts. taps_TX: the target's states, which may be overwritten."""
        return self._passed(prepared, prepared.tensors.token_ids_T, taps_TX, True)

    @torch.inference_mode()
    def states(self, prepared: Pass, state_TH: Tensor, drawn_M: Tensor | None = None) -> HeadOutput:
        """Run a pass.

        state_TH: states that the rows read; drawn_M: tokens that only the device knows.
        """
        return self._passed(prepared, self.token_ids(prepared.tensors, drawn_M), state_TH, False)

    def _passed(self, prepared: Pass, ids_T: Tensor, state_TX: Tensor, are_target_states: bool) -> HeadOutput:
        tensors = prepared.tensors
        output = self.backend.passed(
            ids_T, tensors.positions_T, prepared.metadata, tensors.wanted_N, state_TX, are_target_states
        )
        return HeadOutput(*output)

    @torch.inference_mode()
    def store(self, reading: Reading) -> None:
        """Store the K/V that a head of the DFlash types needs of texts."""
        self.backend.block(reading, (), _NO_ROWS)

    @torch.inference_mode()
    def block(self, reading: Reading | None, blocks: Sequence[Pass], rows_N: Tensor) -> HeadOutput:
        """Read texts and compute whole blocks after them (`HeadBackend.block`)."""
        return HeadOutput(*self.backend.block(reading, blocks, rows_N))

    def logits_of(self, output: HeadOutput) -> Tensor:
        """Return [N, V] float32 logits below rows with these outputs."""
        logits_NV: Tensor = self.head.in_target_tokens(self.head.scaled(output.product_NX), self.vocab_size)
        return logits_NV

    def _compute(
        self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor
    ) -> Tensor:
        """Return [N, V] logits of rows that read zeros, to measure the time of passes."""
        config = self.head.config
        state_TH = None
        if config.block is None:
            state_TH = torch.zeros(len(token_ids_T), config.hidden_size)
        output = self.backend.passed(token_ids_T, positions_T, metadata, wanted_N, state_TH, False)
        return self.logits_of(HeadOutput(*output))


def mask_nodes(tokens: tuple[int, ...], is_causal: bool) -> NodeInput:
    """Return rows after a text at the positions that follow it, which see each other."""
    seen = np.ones((len(tokens), len(tokens)), dtype=np.bool_)
    return NodeInput(tokens, range(1, len(tokens) + 1), (), np.tril(seen) if is_causal else seen)
