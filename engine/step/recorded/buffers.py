"""Models and memory that all recorded steps share, because they run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.drafting.drafter import Drafter
from engine.models.runner import ModelRunner
from engine.step.recorded.inputs import StepShape


class Buffers(NamedTuple):
    """The models of all recorded steps, and the buffers of the largest."""

    target: ModelRunner
    draft: ModelRunner | None
    drafter: Drafter | None
    """Drafts apart."""
    most_pages: int
    logits_NV: Tensor
    """Logits of the target."""
    draft_probs_NV: Tensor

    @staticmethod
    def of(
        runners: Sequence[ModelRunner], drafter: Drafter | None, shapes: Sequence[StepShape], most_pages: int
    ) -> Buffers:
        """Allocate the buffers for steps of these shapes; the other operands are those of `RecordedSteps.record`."""
        target, draft = runners[0], runners[1] if len(runners) > 1 else None

        def rows_of_vocabulary(count: int) -> Tensor:
            return torch.zeros((count, target.vocab_size), device=target.device)

        return Buffers(
            target,
            draft,
            drafter,
            most_pages,
            rows_of_vocabulary(max(shape.num_rows for shape in shapes)),
            rows_of_vocabulary(max(shape.num_probs for shape in shapes)),
        )
