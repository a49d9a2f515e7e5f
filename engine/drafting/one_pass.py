"""Drafting with a head that computes all depths in one pass, from which any number of chains is drawn.

The pass depends on the text alone. The sampler (`models/heads/samplers.py`) adds the dependence on earlier tokens of
the chain, if the head has any. So chains are independent given the text.

Words: a *draft row* is the row of the pass that drafts the token of one depth. A *mask block* is the last token of a
text and the masks after it, which a head of the DFlash types computes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import Ints, SequenceInput
from engine.drafting.draft import Layout
from engine.drafting.head import HeadDrafter, parents
from engine.drafting.levels import levels_of
from engine.drafting.reading import readings, states_before
from engine.drafting.tables import draft_rows_of, draw_from, may_draw_at_once
from engine.kernels.protocol import ProbsTable
from engine.kernels.transfer import to_device
from engine.models.heads.head import HeadOutput
from engine.models.heads.runner import Reading, mask_nodes
from engine.models.heads.samplers import ChainSampler
from engine.models.runner import ModelRunner, Pass
from engine.plan import Plan, Row
from engine.sampling.distribution import DistributionParameters


class OnePassDrafter(HeadDrafter):
    """Computes the logits of a head that drafts in one pass."""

    _sampler: ChainSampler

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Tensor:
        """Read the missing states of the texts that draft, and run the pass; return [N, V] logits below the roots."""
        self._rows = [row for row in plan.rows if row.fanout]
        if not self._rows:
            return self._nothing()
        self._sampler = self._run_pass()
        return self._sampler.below(self._of_depth(0), self._last_tokens(), None)

    @torch.inference_mode()
    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable] | None:
        """Run the pass, and draw all chains of all texts; None for rows that need `begin` and `below`."""
        if not self.runner.head.config.has_tables or not may_draw_at_once(plan, layout):
            return None
        self._rows = [row for row in plan.rows if row.fanout]
        sampler: ChainSampler = self._run_pass()
        draft_rows = draft_rows_of(layout)
        tables = sampler.tables(draft_rows.first_R, self._last_tokens())
        return draw_from(tables, draft_rows, parameters, uniform_LC, self.runner.vocab_size)

    def _run_pass(self) -> Any:
        """Return the sampler (`ChainSampler`) from which the texts' chains are drawn."""
        lengths = [row.draft_length for row in self._rows]
        return self.runner.head.sampler(self._pass(self._rows), lengths, self.runner.vocab_size)

    def _last_tokens(self) -> Tensor:
        """[R] the last token of each text that drafts."""
        return to_device(np.array([row.input_ids[-1] for row in self._rows]), self.runner.device)

    @torch.inference_mode()
    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the nodes of a depth."""
        parent_N = to_device(parents(self._rows, depth), self.runner.device)
        return self._sampler.below(self._of_depth(depth), token_N, parent_N)

    def _of_depth(self, depth: int) -> Tensor:
        """Return the draft row [N] of each node of a depth: the draft rows of a row are contiguous."""
        draft_rows: list[Ints] = []
        start = 0
        for row in self._rows:
            if row.draft_length > depth:
                draft_rows.append(np.full(row.widths[depth - 1] if depth else 1, start + depth))
            start += row.draft_length
        return to_device(np.concatenate(draft_rows), self.runner.device)

    def _pass(self, rows: Sequence[Row]) -> Any:
        """Return the results of the pass for the draft rows, after texts that have been read."""
        raise NotImplementedError


class MaskDrafter(OnePassDrafter):
    """Computes a P-EAGLE head's logits: masks follow the last token of a text, in the pass that reads it."""

    def _pass(self, rows: Sequence[Row]) -> HeadOutput:
        *earlier, last = readings(rows, ends_wanted=True)
        mask = self.runner.head.config.mask_token_id
        with_masks = [
            replace(part, nodes=mask_nodes((mask,) * (row.draft_length - 1), is_causal=True))
            for part, row in zip(last, rows, strict=True)
        ]
        passes = self.runner.prepare([*earlier, with_masks])
        for one in passes[:-1]:
            self._read(one)
        head, layout = self.runner.head, passes[-1].layout
        taps_TX = head.mask_hidden[0].repeat(len(layout.token_ids_T), 1)
        is_text_T = np.concatenate(
            [np.arange(len(p.input_ids) + len(p.nodes.depths)) < len(p.input_ids) for p in with_masks]
        )
        taps_TX[to_device(np.flatnonzero(is_text_T), self.runner.device)] = states_before(with_masks, self._target)
        return self.runner.read(passes[-1], taps_TX)


class BlockDrafter(OnePassDrafter):
    """Computes the logits of a head of the DFlash types. Its mask blocks follow the texts, and later steps do not read
    them.
    """

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        super().__init__(runner, target)
        self._levels = levels_of(runner)
        self._spare_block = target.storage.keys.shape[1] // target.block_size
        """First of the K/V blocks that only the head's storage has, for masks beyond the row's own K/V blocks."""

    @torch.inference_mode()
    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable] | None:
        """Run the pass, and draw all chains of all texts; None for rows that need `begin` and `below`."""
        levels, vocab_size = self._levels, self.runner.vocab_size
        if levels is None or not levels.has_term or not levels.takes(plan, layout, vocab_size):
            return super().draw(plan, layout, parameters, uniform_LC)
        self._rows = [row for row in plan.rows if row.fanout]
        base_SX = self._pass(self._rows).product_NX
        probs_NV = torch.empty((layout.num_probs, vocab_size))
        tokens_CL = levels.draw_below(base_SX, self._last_tokens(), layout, parameters, uniform_LC, probs_NV)
        return tokens_CL, ProbsTable(probs_NV, layout.probs_row_CL, parameters.kernels)

    def _pass(self, rows: Sequence[Row]) -> HeadOutput:
        reading, head = readings(rows, ends_wanted=False), self.runner.head
        kinds = head.block_config.causalities
        passes = self.runner.prepare([*reading, *(self._mask_blocks(rows, is_causal) for is_causal in kinds)])
        blocks = passes[len(reading) :]
        for one in passes[: max(0, len(reading) - 1)]:
            self._read(one)
        last = self._reading(passes[len(reading) - 1]) if reading else None
        return self.runner.block(last, blocks, head.rows([row.draft_length for row in rows]))

    def _read(self, one: Pass) -> None:
        """Store the states of texts that the head reads again."""
        self.runner.store(self._reading(one))

    def _reading(self, one: Pass) -> Reading:
        return Reading(one, states_before(one.layout.sequences, self._target))

    def _mask_blocks(self, rows: Sequence[Row], is_causal: bool) -> list[SequenceInput]:
        head = self.runner.head
        masks = (head.config.mask_token_id,) * (head.block_config.size - 1)
        return [
            SequenceInput(
                (),
                row.end,
                self._block_ids(row, number),
                mask_nodes((row.input_ids[-1], *masks), is_causal),
                slice(None),
                max(1, row.first_draft_key),
            )
            for number, row in enumerate(rows)
        ]

    def _block_ids(self, row: Row, number: int) -> tuple[int, ...]:
        """Return the row's K/V blocks, and spare ones for the masks that these cannot hold."""
        size, block_size = self.runner.head.block_config.size, self.runner.block_size
        missing = -(-(row.end + size) // block_size) - len(row.block_ids)
        first = self._spare_block + number * -(-size // block_size)
        return (*row.block_ids, *range(first, first + max(0, missing)))
