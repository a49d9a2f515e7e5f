"""Drafters whose chains are drawn in one compiled call (`levels.py`), for rows that allow it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.cpu.levels import DrawTask, Levels, levels_of
from engine.drafting.draft import Layout
from engine.drafting.drafter import ChainSource, Drafter
from engine.drafting.eagle import EagleDrafter
from engine.drafting.model import ModelDrafter
from engine.drafting.one_pass import BlockDrafter
from engine.drafting.tables import may_draw_at_once
from engine.kernels.protocol import ProbsTable
from engine.plan import Plan
from engine.sampling.distribution import DistributionParameters


class CompiledDrafting:
    """Draws the chains of a step in one call, if rows need no more than it has."""

    def __init__(self, drafter: ChainSource, vocab_size: int, draw_at_once: Callable[[Plan, DrawTask], Tensor]) -> None:
        """draw_at_once: catches up on a plan's texts, and returns [C, L] the tokens."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._draw_at_once = draw_at_once

    def begin(self, plan: Plan) -> Tensor:
        """Catch up on texts, as the drafter does."""
        return self._drafter.begin(plan)

    @torch.inference_mode()
    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable]:
        """Return [C, L] tokens of the plan's chains, and their distributions."""
        if not may_draw_at_once(plan, layout):
            return self._drafter.draw(plan, layout, parameters, uniform_LC)
        probs_NV = torch.empty((layout.num_probs, self._vocab_size))
        tokens_CL = self._draw_at_once(plan, DrawTask(layout, parameters, uniform_LC, probs_NV))
        return tokens_CL, ProbsTable(probs_NV, layout.probs_row_CL, parameters.kernels)


def compiled(drafter: Drafter) -> ChainSource:
    """Return the source of chains in one call, or else the drafter itself."""
    if drafter.runner is None:
        return drafter
    levels = levels_of(drafter.runner)
    if levels is None:
        return drafter
    draw_at_once = _drawing(drafter, levels)
    if draw_at_once is None:
        return drafter
    return CompiledDrafting(drafter, levels.vocab_size, draw_at_once)


def _drawing(drafter: Drafter, levels: Levels) -> Callable[[Plan, DrawTask], Tensor] | None:
    """Return the call that draws with a drafter of this type; None if there is none."""

    def draw_by_level(plan: Plan, task: DrawTask) -> Tensor:
        assert isinstance(drafter, ModelDrafter | EagleDrafter)
        passes, taps_TX = drafter.level_inputs(plan)
        return levels.draw(passes, taps_TX, task)

    def draw_below_a_pass(plan: Plan, task: DrawTask) -> Tensor:
        assert isinstance(drafter, BlockDrafter)
        base_SX, last_R = drafter.products(plan)
        return levels.draw_below(base_SX, last_R, task)

    if isinstance(drafter, ModelDrafter | EagleDrafter):
        return draw_by_level
    if isinstance(drafter, BlockDrafter) and levels.has_term:
        return draw_below_a_pass
    return None
