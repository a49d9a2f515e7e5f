"""Drafting with an EAGLE-3 head: one pass of one layer for each level, from the target's own states."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.drafting.draft import Layout
from engine.drafting.head import HeadDrafter, parents
from engine.drafting.levels import levels_of
from engine.drafting.model import level_inputs
from engine.drafting.reading import readings, states_before
from engine.kernels.protocol import ProbsTable
from engine.kernels.transfer import to_device
from engine.models.heads.head import HeadOutput
from engine.models.runner import ModelRunner, Pass
from engine.plan import Plan
from engine.sampling.distribution import DistributionParameters


class EagleDrafter(HeadDrafter):
    """Computes an EAGLE-3 head's logits."""

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        super().__init__(runner, target)
        self._passes: list[Pass] = []
        self._output = HeadOutput(torch.empty(0), torch.empty(0))
        """Output of the level that was computed last."""
        self._levels = levels_of(runner)

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Tensor:
        """Read the missing states of the texts that draft; return [N, V] logits below the roots."""
        self._rows = [row for row in plan.rows if row.fanout]
        if not self._rows:
            return self._nothing()
        reading = readings(self._rows, ends_wanted=True)
        passes = self.runner.prepare([*reading, *level_inputs(self._rows, lowest_key=1)])
        for one in passes[: len(reading)]:
            self._output = self._read(one)
        self._passes = passes[len(reading) :]
        return self.runner.logits_of(self._output)

    @torch.inference_mode()
    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the nodes of a depth."""
        parent_N = to_device(parents(self._rows, depth), self.runner.device)
        self._output = self.runner.states(self._passes[depth - 1], self._output.state_NH[parent_N], token_N)
        return self.runner.logits_of(self._output)

    @torch.inference_mode()
    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable] | None:
        """Read texts and draw all levels in one call; return None for rows that need `begin` and `below`."""
        if self._levels is None or not self._levels.takes(plan, layout, self.runner.vocab_size):
            return None
        rows = [row for row in plan.rows if row.fanout]
        *earlier, last = readings(rows, ends_wanted=True)
        for one in self.runner.prepare(earlier) if earlier else ():
            self._read(one)
        taps_TX = states_before(last, self._target)
        probs_NV = torch.empty((layout.num_probs, self.runner.vocab_size))
        passes = [last, *level_inputs(rows, lowest_key=1)]
        tokens_CL = self._levels.draw(passes, layout, parameters, uniform_LC, probs_NV, taps_TX)
        return tokens_CL, ProbsTable(probs_NV, layout.probs_row_CL, parameters.kernels)
