"""Drafts chains with a small model: one pass to catch up, one more per further level.

The draft model's K/V has the same blocks as the target's. Below the root the nodes lie level by level, and
within a level in the order of their chains. Equal tokens are not merged here: every drawn node has its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from engine.cache.tensors import KVMoves
from engine.drafters.draft import ChainShape, Draft, Layout, Level, draw_noise, layout_of, merge
from engine.execution.inputs import NO_NODES, Nodes, SequenceInput, to_device
from engine.execution.runner import ModelRunner, Pass
from engine.plan import Plan, Row, level_widths
from engine.sampling.edits import NodeContext, edit
from engine.sampling.law import LawParameters, law
from engine.sampling.stable import race, winners_only
from engine.speculation.drafting import MOST_LIKELY, Chains, LawTable, TargetShifts, children


class ModelDrafter:
    """Draws every row's chains from a draft model; without a model, chains of length 0."""

    def __init__(self, runner: ModelRunner | None, device: torch.device, vocab_size: int) -> None:
        self.runner = runner
        self.device = device
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def draw(self, plan: Plan) -> Draft | None:
        """Compute the draft K/V the plan asks for, and draft its chains; None when no row emits."""
        rows = plan.sampling_rows
        # Which tokens enter which pass is known before any is drawn.
        passes = self._prepare(plan)
        root_NV = torch.empty((0, self.vocab_size), device=self.device)
        if self.runner is not None and passes:
            root_NV = self.runner.run(passes[0])
        if not rows:
            return None
        layout = layout_of(tuple(map(ChainShape.of, rows)), self.device)
        seed_C = np.array([row.sampling.seed for row in rows], dtype=np.int64)[layout.request_C]
        end_C = np.array([row.end for row in rows], dtype=np.int64)[layout.request_C]
        uniform_CL, noise = draw_noise(seed_C, end_C, layout.rank_C, layout.max_length, self.device)
        parameters = LawParameters.of([row.sampling for row in rows], self.device)
        tokens_CL, law_NV = self._draw_levels(rows, layout, parameters, uniform_CL, root_NV, passes)
        chains = Chains(
            tokens_CL,
            layout.length,
            layout.request,
            LawTable(law_NV, layout.law_row_CL),
            layout.leads_CL,
            _shifts(rows, layout, self.device),
            layout.shape,
        )
        return Draft(layout, chains, merge(plan, layout, tokens_CL), parameters, noise)

    def keep(self, moves: Sequence[KVMoves]) -> None:
        """Make accepted K/V contiguous in the draft model's storage, by sequence."""
        if self.runner is not None:
            self.runner.keep(moves)

    @staticmethod
    def node_index(row: Row, chain: int, depth: int) -> int:
        """Index, in the sequence, of the draft K/V of a chain's node (depth 1 is the first drafted token)."""
        width = row.widths[depth - 1]
        return row.end + sum(row.widths[: depth - 1]) + chain // (row.num_drafts // width)

    @staticmethod
    def _first_key(row: Row) -> int:
        """Index of the first token the model sees: at least all it computes now."""
        nearest = min(row.draft_first_index, row.end - row.draft_window) if row.draft_window else 0
        return max(row.draft_start, nearest)

    def _prepare(self, plan: Plan) -> list[Pass]:
        """The passes of a step: over all known tokens that are missing, then over the drafted nodes level by level."""
        parts = [
            SequenceInput(
                row.draft_input_ids,
                row.draft_first_index,
                row.block_ids,
                NO_NODES,
                slice(len(row.draft_input_ids) - bool(row.fanout), None),
                self._first_key(row),
            )
            for row in plan.rows
            if row.draft_input_ids
        ]
        if not parts:
            return []
        assert self.runner is not None, "a row speculates without a draft model"
        passes = [parts]
        for depth in range(1, max(row.draft_length for row in plan.rows)):
            passes.append(
                [
                    SequenceInput(
                        (),
                        row.end,
                        row.block_ids,
                        _level_nodes(row.fanout[:depth]),
                        slice(None),
                        self._first_key(row),
                    )
                    for row in plan.rows
                    if row.draft_length > depth
                ]
            )
        return self.runner.prepare(passes)

    def _draw_levels(
        self,
        rows: Sequence[Row],
        layout: Layout,
        parameters: LawParameters,
        uniform_CL: Tensor,
        logits_NV: Tensor,
        passes: Sequence[Pass],
    ) -> tuple[Tensor, Tensor]:
        """Draw all chains level by level; the tokens [C, L] and the laws they came from.

        logits_NV: below the root of every row that draws; passes: the step's passes, the first of which gave them.
        """
        tokens_CL = torch.zeros_like(uniform_CL, dtype=torch.int64)
        law_NV = torch.empty((layout.num_laws, self.vocab_size), device=self.device)
        of_law = parameters.select(layout.law_row_of_N)
        for depth, level in enumerate(layout.levels):
            if depth > 0:
                assert self.runner is not None
                # Tokens stay on the device.
                logits_NV = self.runner.run(passes[depth], tokens_CL[level.chain_N, depth - 1])
            logits_NV = edit(logits_NV, _contexts(rows, level, tokens_CL, depth))
            below_NV = law_NV[level.laws]
            below_NV.copy_(law(logits_NV, of_law.select(level.laws)))
            order_NV = _race_stable(rows, level, depth, below_NV, logits_NV)
            tokens_C = tokens_CL[:, depth]
            for draw in level.draws:
                weights_NV = order_NV if draw.method == MOST_LIKELY else below_NV
                weights_NV = weights_NV if draw.parent_N is None else weights_NV[draw.parent_N]
                tokens_C[draw.chain_NK] = children(draw.method, weights_NV, uniform_CL[draw.chain_NK, depth])
            if level.leader_C is not None:
                tokens_C.copy_(tokens_C[level.leader_C])
        return tokens_CL, law_NV


@lru_cache(maxsize=1024)
def _level_nodes(fanout: tuple[int, ...]) -> Nodes:
    """The nodes of the last level, behind those of the levels above it."""
    widths = level_widths(fanout)
    node_N = np.arange(widths[-1])
    ancestry = [node_N[:, None] // (widths[-1] // width) == np.arange(width) for width in widths]
    depths = [depth for depth, width in enumerate(widths, start=1) for _ in range(width)]
    return Nodes((), depths[-widths[-1] :], depths[: -widths[-1]], np.concatenate(ancestry, axis=1))


def _contexts(rows: Sequence[Row], level: Level, tokens_CL: Tensor, depth: int) -> list[NodeContext | None]:
    """Where the laws below a level's parents are, for the rows that edit their logits."""
    if not any(row.text for row in rows):
        return []
    paths = tokens_CL[level.chain_N, :depth].tolist()
    contexts: list[NodeContext | None] = []
    for number, path in zip(level.row_N.tolist(), paths, strict=True):
        text = rows[number].text
        contexts.append(None if text is None else NodeContext(rows[number].sampling, text, tuple(path)))
    return contexts


def _race_stable(rows: Sequence[Row], level: Level, depth: int, law_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """For seed-stable rows: what orders their tokens instead of logits; their laws become the winner's, in place."""
    if not any(row.sampling.seed_stable for row in rows):
        return logits_NV
    numbers = [n for n, row in enumerate(level.row_N.tolist()) if rows[row].sampling.seed_stable]
    if not numbers:
        return logits_NV
    stable = [rows[row] for row in level.row_N[numbers]]
    race_MV = race(law_NV[numbers], [row.sampling for row in stable], [row.end + depth for row in stable])
    law_NV[numbers] = winners_only(race_MV)
    order_NV = logits_NV.clone()
    order_NV[numbers] = race_MV.float()
    return order_NV


def _shifts(rows: Sequence[Row], layout: Layout, device: torch.device) -> TargetShifts | None:
    """The rows' pending target shifts, by chain."""
    most = max(len(row.shifts) for row in rows)
    if not most:
        return None
    remaining_RM, count_RM = np.zeros((len(rows), most), dtype=np.int64), np.ones((len(rows), most), dtype=np.int64)
    state_RM4 = np.zeros((len(rows), most, 4))
    for i, row in enumerate(rows):
        for j, shift in enumerate(row.shifts):
            remaining_RM[i, j], count_RM[i, j], state_RM4[i, j] = shift.remaining, shift.num_chains, shift.state
    index_C = layout.request_C
    parts = (to_device(array[index_C], device) for array in (remaining_RM, state_RM4, count_RM))
    return TargetShifts(*parts)
