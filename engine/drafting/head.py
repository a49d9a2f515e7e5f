"""Drafting with any head: it reads texts, and reads accepted tokens again.

A step begins after the tokens that the target has accepted: the rows of accepted tokens are computed from the target's
states, and overwrite the drafted ones in their slots. So nothing of a rejected branch reaches the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import Ints
from engine.drafting.reading import readings, states_before
from engine.models.heads.runner import HeadRunner
from engine.models.runner import ModelRunner, Pass
from engine.plan import Emission, Plan, Row


class HeadDrafter:
    """Base of drafters with a head."""

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        assert isinstance(runner, HeadRunner)
        self.runner: HeadRunner = runner
        self._target = target
        self._rows: list[Row] = []
        """Rows that draft in this step."""

    @torch.inference_mode()
    def keep(self, plan: Plan, emissions: Sequence[Emission]) -> None:  # noqa: ARG002  (accepted drafts are read again)
        """Read the target's states of texts that did not draft in this step."""
        reading = readings([row for row in plan.rows if not row.fanout], ends_wanted=False)
        for one in self.runner.prepare(reading) if reading else ():
            self._read(one)

    def _read(self, one: Pass) -> Any:
        """Read texts; return the head's output at the wanted rows, if it has any."""
        return self.runner.read(one, states_before(one.layout.sequences, self._target))

    def _nothing(self) -> Tensor:
        """Return [0, V] logits."""
        return torch.empty((0, self.runner.vocab_size), device=self.runner.device)


def parents(rows: Sequence[Row], depth: int) -> Ints:
    """Return [N] the index of each node's parent among the nodes of the level above that draft.

    rows: all that draft. Level 0 has one root for each.
    """
    found: list[Ints] = []
    start = 0
    for row in rows:
        if row.draft_length < depth:
            continue
        above = row.widths[depth - 2] if depth > 1 else 1
        if row.draft_length > depth:
            found.append(start + np.arange(row.widths[depth - 1]) // row.fanout[depth - 1])
        start += above
    return np.concatenate(found)
