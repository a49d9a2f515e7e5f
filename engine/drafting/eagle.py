"""Drafting with an EAGLE-3 head: one pass of one layer for each level, from the target's own states."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.drafting.head import HeadDrafter, parents
from engine.drafting.model import level_inputs
from engine.drafting.reading import readings
from engine.kernels.transfer import to_device
from engine.models.runner import ModelRunner, Pass
from engine.plan import Plan


class EagleDrafter(HeadDrafter):
    """Computes an EAGLE-3 head's logits."""

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        super().__init__(runner, target)
        self._levels: list[Pass] = []
        self._states_NH = torch.empty(0)
        """State of the level that was computed last."""

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Tensor:
        """Read the missing states of the texts that draft; return [N, V] logits below the roots."""
        self._rows = [row for row in plan.rows if row.fanout]
        if not self._rows:
            return self._nothing()
        reading = readings(self._rows, ends_wanted=True)
        passes = self.runner.prepare([*reading, *level_inputs(self._rows, lowest_key=1)])
        for one in passes[: len(reading)]:
            self._states_NH = self._read(one)
        self._levels = passes[len(reading) :]
        return self.runner.logits_of(self._states_NH)

    @torch.inference_mode()
    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the nodes of a depth."""
        parent_N = to_device(parents(self._rows, depth), self.runner.device)
        self._states_NH = self.runner.states(self._levels[depth - 1], self._states_NH[parent_N], token_N)
        return self.runner.logits_of(self._states_NH)
