"""Drafts with an EAGLE-3 head: one pass of one layer for each level, below the target's own states.

A step begins behind what the target has accepted: the rows of accepted tokens are computed again from the target's
states, over those that were computed from the head's own. So nothing of a rejected branch reaches the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.drafters.model import level_inputs
from engine.drafters.reading import readings, states_before
from engine.execution.heads.runner import HeadRunner
from engine.execution.inputs import Ints
from engine.execution.runner import ModelRunner, Pass
from engine.plan import Emission, Plan, Row
from engine.transfer import to_device


class EagleDrafter:
    """Gives an EAGLE-3 head's logits."""

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        assert isinstance(runner, HeadRunner)
        self.runner: HeadRunner = runner
        self._target = target
        self._rows: list[Row] = []
        self._levels: list[Pass] = []
        self._states_NH = torch.empty(0)
        """Of the level that was computed last."""

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Tensor:
        """Read what is missing of the texts that draft; [N, V] logits below the roots."""
        self._rows = [row for row in plan.rows if row.fanout]
        if not self._rows:
            return torch.empty((0, self.runner.vocab_size), device=self.runner.device)
        reading = readings(self._rows, ends_wanted=True)
        passes = self.runner.prepare([*reading, *level_inputs(self._rows, lowest_key=1)])
        for one in passes[: len(reading)]:
            self._states_NH = self._read(one)
        self._levels = passes[len(reading) :]
        return self.runner.logits_of(self._states_NH)

    @torch.inference_mode()
    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """[N, V] logits below the nodes of a depth."""
        parent_N = to_device(parents(self._rows, depth), self.runner.device)
        self._states_NH = self.runner.states(self._levels[depth - 1], self._states_NH[parent_N], token_N)
        return self.runner.logits_of(self._states_NH)

    @torch.inference_mode()
    def keep(self, plan: Plan, emissions: Sequence[Emission]) -> None:  # noqa: ARG002  (accepted drafts are read again)
        """Read what the target has computed of the texts that did not draft in this step."""
        reading = readings([row for row in plan.rows if not row.fanout], ends_wanted=False)
        for one in self.runner.prepare(reading) if reading else ():
            self._read(one)

    def _read(self, one: Pass) -> Tensor:
        """[N, H] the head's states at the wanted rows."""
        projected_TH = self.runner.head.project(states_before(one.batch.sequences, self._target))
        return self.runner.states(one, projected_TH)


def parents(rows: Sequence[Row], depth: int) -> Ints:
    """[N] place of the parent of each node of a depth, among the states of the level above.

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
