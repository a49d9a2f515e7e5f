"""Drafts with an EAGLE-3 head: a pass of one layer for each level, from the target's states."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.inputs import SequenceInput
from engine.drafting.drafter import DraftWork
from engine.drafting.head import HeadDrafter
from engine.drafting.model import level_passes
from engine.drafting.reading import readings, states_at
from engine.heads.head import HeadOutput
from engine.models.runner import ModelRunner
from engine.plan import Plan


class EagleDrafter(HeadDrafter):
    pass_nodes = staticmethod(level_passes)

    def __init__(self, runner: ModelRunner, target: ModelRunner) -> None:
        super().__init__(runner, target)
        self._work = DraftWork(())
        self._output = HeadOutput(torch.empty(0), torch.empty(0))
        """Output of the last computed level."""

    def start(self, work: DraftWork) -> Tensor:
        """Read texts; return [N, V] logits below the roots."""
        assert work.head_inputs is not None
        self._work = work
        self._output = self._read(work.passes[0], states_at(work.head_inputs.before_T, self._target))
        return self.runner.logits_of(self._output)

    @torch.inference_mode()
    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the nodes of a depth."""
        assert self._work.head_inputs is not None
        parent_N = self._work.head_inputs.places.parents[depth - 1]
        state_NH = self._output.state_NH[parent_N]
        self._output = self.runner.states(self._work.passes[depth], state_NH, token_N)
        return self.runner.logits_of(self._output)

    def level_inputs(self, plan: Plan) -> tuple[list[list[SequenceInput]], Tensor]:
        """Read what does not fit into one pass.

        Returns (inputs of the last pass that reads texts and of later passes, the target's states
        that the last reading pass needs).
        """
        rows = [row for row in plan.rows if row.fanout]
        *earlier, last = readings(rows, ends_wanted=True)
        self._read_all(earlier)
        taps_TX = self._states_before(last)
        return self._inputs(last, rows), taps_TX
