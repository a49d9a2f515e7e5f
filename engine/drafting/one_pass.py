"""Drafts with a head that computes all depths in one pass, from which chains are drawn.

The pass depends on the text alone. The sampler (`heads/samplers.py`) adds the dependence on earlier
tokens of the chain, if the head has any. So chains are independent given the text.

A *draft row* is the row of the pass that drafts the token of one depth. A *mask block* is the last
token of a text and the masks after it, which a head of the DFlash types computes together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.attention.inputs import NO_NODES, NodeInput
from engine.drafting.draft import Layout
from engine.drafting.drafter import DraftWork, HeadInputs
from engine.drafting.head import HeadDrafter
from engine.drafting.reading import states_at
from engine.drafting.tables import draft_rows_of, draw_from, may_draw_at_once
from engine.heads.head import HeadOutput
from engine.heads.runner import Reading, mask_nodes
from engine.heads.samplers import ChainSampler
from engine.kernels.protocol import ProbsTable
from engine.kernels.transfer import to_device
from engine.models.runner import ModelRunner, Pass
from engine.plan import Plan, Row
from engine.sampling.distribution import DistributionParameters


class OnePassDrafter(HeadDrafter):
    """Computes the logits of a head that drafts in one pass."""

    _sampler: ChainSampler
    _head_inputs: HeadInputs

    def start(self, work: DraftWork) -> Tensor:
        """Run the pass; return [N, V] logits below the roots."""
        assert work.head_inputs is not None
        self._head_inputs = work.head_inputs
        self._sampler = self._run_pass(work)
        places = self._head_inputs.places
        return self._sampler.below(places.draft_rows[0], self._head_inputs.last_R, None)

    @torch.inference_mode()
    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable]:
        """Run the pass; draw all chains of all texts from its tables if the rows allow it."""
        if not self.runner.head.config.has_tables or not may_draw_at_once(plan, layout):
            return super().draw(plan, layout, parameters, uniform_LC)
        work = self._prepared([row for row in plan.rows if row.fanout])
        assert work.head_inputs is not None
        sampler: ChainSampler = self._run_pass(work)
        draft_rows = draft_rows_of(layout)
        tables = sampler.tables(draft_rows.first_R, work.head_inputs.last_R)
        vocab_size = self.runner.vocab_size
        return draw_from(tables, draft_rows, parameters, uniform_LC, vocab_size)

    def _run_pass(self, work: DraftWork) -> Any:
        """Return the sampler (`ChainSampler`) from which the texts' chains are drawn."""
        assert work.head_inputs is not None
        output = self._pass(work.passes, work.head_inputs)
        lengths = work.head_inputs.places.lengths
        return self.runner.head.sampler(output, lengths, self.runner.vocab_size)

    @torch.inference_mode()
    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the nodes of a depth."""
        places = self._head_inputs.places
        return self._sampler.below(places.draft_rows[depth], token_N, places.parents[depth - 1])

    def _pass(self, passes: Sequence[Pass], head_inputs: HeadInputs) -> HeadOutput:
        """Return the results of the pass for the draft rows."""
        raise NotImplementedError


class MaskDrafter(OnePassDrafter):
    """Computes a P-EAGLE head's logits, with masks after the last token in the pass over a text."""

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        super().__init__(runner, target)
        self.pass_nodes = partial(_with_masks, self.runner.head.config.mask_token_id)

    def _pass(self, passes: Sequence[Pass], head_inputs: HeadInputs) -> HeadOutput:
        reads_T1 = (head_inputs.before_T >= 0).unsqueeze(1)
        taps_TX = states_at(head_inputs.before_T.clamp(min=0), self._target)
        taps_TX = torch.where(reads_T1, taps_TX, self.runner.head.mask_hidden[0])
        return self.runner.read(passes[0], taps_TX)


def _with_masks(
    mask: int,
    fanout: tuple[int, ...],
    last_token: int = 0,  # noqa: ARG001
) -> list[NodeInput]:
    """Return the masks in the pass over a text."""
    return [mask_nodes((mask,) * (len(fanout) - 1), is_causal=True)]


class BlockDrafter(OnePassDrafter):
    """Computes the logits of a head of the DFlash types.

    Its mask blocks follow the texts. Later steps do not read them.
    """

    _wants_ends = False

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        super().__init__(runner, target)
        head = self.runner.head
        masks = (head.config.mask_token_id,) * (head.block_config.size - 1)
        self.pass_nodes = partial(_with_blocks, masks, head.block_config.causalities)
        self._spare_block = target.storage.num_slots // target.block_size
        """First K/V block of the head's storage alone, for masks beyond a row's blocks."""

    def products(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Run the pass.

        Returns ([S, draft vocabulary] products with the output head by draft row, the last tokens
        of the texts that draft).
        """
        work = self._prepared([row for row in plan.rows if row.fanout])
        assert work.head_inputs is not None
        return self._pass(work.passes, work.head_inputs).product_NX, work.head_inputs.last_R

    def table_of(self, row: Row, number: int) -> tuple[int, ...]:
        """Return the row's K/V blocks, and spare blocks for masks that need more."""
        num_masks = self.runner.head.block_config.size
        block_size = self.runner.block_size
        num_needed = -(-(row.end + num_masks) // block_size)
        num_missing = num_needed - len(row.block_ids)
        if num_missing <= 0:
            return row.block_ids
        num_spare = -(-num_masks // block_size)
        first = self._spare_block + number * num_spare
        return (*row.block_ids, *range(first, first + num_missing))

    def _rows_of(self, lengths: Sequence[int]) -> Tensor:
        return to_device(self.runner.head.rows(lengths), self.runner.device)

    def _pass(self, passes: Sequence[Pass], head_inputs: HeadInputs) -> HeadOutput:
        assert head_inputs.rows_N is not None
        reading = Reading(passes[0], states_at(head_inputs.before_T, self._target))
        return self.runner.block(reading, passes[1:], head_inputs.rows_N)

    def _read(self, prepared: Pass, taps_TX: Tensor) -> None:
        """Store the states of texts that the head reads again."""
        self.runner.store(Reading(prepared, taps_TX))


def _with_blocks(
    masks: tuple[int, ...],
    causalities: tuple[bool, ...],
    fanout: tuple[int, ...],
    last_token: int = 0,
) -> list[NodeInput]:
    """Return the nodes of each pass: none over the text, and a mask block for each causality."""
    if not fanout:
        return [NO_NODES]
    block = (last_token, *masks)
    return [NO_NODES, *(mask_nodes(block, is_causal) for is_causal in causalities)]
