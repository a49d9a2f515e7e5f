"""Drafts with a small model: a pass to catch up on the text, and one for each further level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.attention.tensors import node_moves, slot_moves
from engine.drafting.chains import draw_by_level
from engine.drafting.draft import Layout
from engine.drafting.drafter import DraftWork
from engine.fanout import Fanout, level_widths, node_of
from engine.kernels.protocol import ProbsTable
from engine.models.runner import ModelRunner, Pass
from engine.plan import Emission, Plan, Row
from engine.sampling.distribution import DistributionParameters


def level_passes(fanout: tuple[int, ...], last_token: int = 0) -> list[NodeInput]:  # noqa: ARG001  (not drafted)
    """Return the nodes of each pass: none in the pass over the text, then level by level."""
    return [NO_NODES, *(level_nodes(fanout[:depth]) for depth in range(1, len(fanout)))]


class ModelDrafter:
    pass_nodes = staticmethod(level_passes)

    def __init__(self, runner: ModelRunner) -> None:
        self.runner: ModelRunner = runner
        self._passes: Sequence[Pass] = ()

    def begin(self, plan: Plan) -> Tensor:
        """Compute the missing K/V; return [N, V] logits below the roots."""
        # The nodes of each pass are known before their tokens are drawn.
        passes = self._inputs(plan)
        if not passes:
            return torch.empty((0, self.runner.vocab_size), device=self.runner.device)
        return self.start(DraftWork(self.runner.prepare(passes)))

    def work_of(self, passes: Sequence[Pass], *_: object) -> DraftWork:
        return DraftWork(passes)

    def read_before(self, plan: Plan, num_text: int) -> None:
        """Read nothing: texts that miss more are not recorded."""

    def start(self, work: DraftWork) -> Tensor:
        """Run the first of some passes; return [N, V] logits below the roots."""
        self._passes = work.passes
        return self.runner.run(self._passes[0])

    def below(self, depth: int, token_N: Tensor) -> Tensor:
        """Return [N, V] logits below the nodes of a depth."""
        return self.runner.run(self._passes[depth], token_N)

    def draw(
        self, plan: Plan, layout: Layout, parameters: DistributionParameters, uniform_LC: Tensor
    ) -> tuple[Tensor, ProbsTable]:
        return draw_by_level(self, plan, layout, parameters, uniform_LC)

    def level_inputs(self, plan: Plan) -> tuple[list[list[SequenceInput]], None]:
        """Return the passes of a step, and no states that the first of them reads."""
        return self._inputs(plan), None

    def keep(self, plan: Plan, emissions: Sequence[Emission]) -> None:
        """Make the K/V of accepted paths contiguous."""
        moves = []
        nodes = []
        for row, emission in zip(plan.sampling_rows, emissions, strict=True):
            if row.num_drafts <= 1 or not emission.num_draft_kept:
                continue  # a lone chain is already in the slots of its tokens
            pairs = [
                (_node_index(row, emission.rank, depth + 1), row.end + depth)
                for depth in range(emission.num_draft_kept)
            ]
            moves.append(slot_moves(pairs, row.draft_table, self.runner.block_size))
            nodes += node_moves(pairs, row.end, row.draft_state)
        if moves:
            self.runner.keep(moves, nodes)

    def table_of(self, row: Row, number: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the blocks of the draft model's K/V."""
        return row.draft_table

    def _inputs(self, plan: Plan) -> list[list[SequenceInput]]:
        """Return the inputs of a step's passes.

        The first pass is over all missing known tokens, the other passes over
        drafted nodes by level.
        """
        texts = []
        for row in plan.rows:
            if row.draft_input_ids:
                wanted = slice(len(row.draft_input_ids) - bool(row.fanout), None)
                texts.append(self._text_input(row, wanted))
        if not texts:
            return []
        passes = [texts]
        for depth in range(1, max(row.draft_length for row in plan.rows)):
            drafting = [row for row in plan.rows if row.draft_length > depth]
            passes.append([self._level_input(row, depth) for row in drafting])
        return passes

    def _text_input(self, row: Row, wanted: slice) -> SequenceInput:
        """Return a row's part of the pass over known tokens."""
        return SequenceInput(
            row.draft_input_ids,
            row.draft_first_index,
            row.draft_table,
            NO_NODES,
            wanted,
            row.first_draft_key,
            row.draft_state,
        )

    def _level_input(self, row: Row, depth: int) -> SequenceInput:
        """Return a row's part of the pass over the nodes of a depth."""
        nodes = level_nodes(row.fanout[:depth])
        return SequenceInput((), row.end, row.draft_table, nodes, slice(None), row.first_draft_key, row.draft_state)


def _node_index(row: Row, chain: int, depth: int) -> int:
    """Return the index in the sequence of a node's K/V; depth 1 is the first drafted token."""
    return row.end + node_of(row.fanout, chain, depth) - 1


@lru_cache(maxsize=1024)
def level_nodes(fanout: Fanout) -> NodeInput:
    """Return the nodes of the last level; the K/V of the levels above is cached."""
    widths = level_widths(fanout)
    last = widths[-1]
    node_N1 = np.arange(last)[:, None]
    ancestry = [node_N1 // (last // width) == np.arange(width) for width in widths]
    depths = [depth for depth, width in enumerate(widths, start=1) for _ in range(width)]
    return NodeInput((), depths[-last:], depths[:-last], np.concatenate(ancestry, axis=1))
