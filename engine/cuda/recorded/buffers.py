"""Models and memory that all recorded steps share, because they run one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.cuda.recorded.inputs import DRAFT_PAGES, PAGES, StepShape
from engine.drafting.drafter import DrafterKind, RecordedDrafter
from engine.models.runner import ModelRunner


class Buffers(NamedTuple):
    """The models of all recorded steps, and the buffers of the largest."""

    target: ModelRunner
    draft: ModelRunner | None
    drafter: RecordedDrafter | None
    """None if nothing is drafted in recorded steps."""
    is_head: bool
    most_pages: int
    spare_blocks: Mapping[str, int]
    """Last block of each model with a block table, for the K/V of padding."""
    logits_NV: Tensor
    draft_probs_NV: Tensor

    @staticmethod
    def of(
        runners: Sequence[ModelRunner],
        kind: DrafterKind | None,
        shapes: Sequence[StepShape],
        most_pages: int,
        has_draft_pool: bool,
    ) -> Buffers:
        """Allocate the buffers for steps of these shapes; operands as in `RecordedSteps.record`."""
        target = runners[0]
        draft = runners[1] if len(runners) > 1 else None
        tables = (PAGES, DRAFT_PAGES) if has_draft_pool else (PAGES,)
        last_blocks = [runner.storage.num_slots // runner.block_size - 1 for runner in runners]
        counts = max(shape.num_rows for shape in shapes), max(shape.num_probs for shape in shapes)
        buffers = (torch.zeros((count, target.vocab_size), device=target.device) for count in counts)
        spare_blocks = dict(zip(tables, last_blocks, strict=False))
        if kind is None or draft is None or not kind.is_recorded:
            return Buffers(target, draft, None, False, most_pages, spare_blocks, *buffers)
        drafter = cast("RecordedDrafter", kind.make(draft, target))
        # Masks have blocks that no request holds.
        masks = [nodes.tokens for shape in shapes for nodes in drafter.pass_nodes(shape.fanout, 0)]
        most_pages += -(-max(map(len, masks)) // target.block_size)
        return Buffers(target, draft, drafter, kind.is_head, most_pages, spare_blocks, *buffers)
