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

from engine.cache.tensors import Moves
from engine.drafters.draft import Draft, Layout, Level, merge
from engine.execution.inputs import NO_NODES, Nodes, SequenceInput, to_device
from engine.execution.runner import ModelRunner
from engine.plan import Plan, Row, level_widths
from engine.sampling.edits import Place, edit
from engine.sampling.law import LawParameters, law
from engine.sampling.noise import Purpose, uniform
from engine.sampling.stable import race, winners_only
from engine.speculation.drafting import MOST_LIKELY, Chains, LawTable, Layers, children
from engine.speculation.verification import RULES


class ModelDrafter:
    """Draws every row's chains from a draft model; without a model, chains of length 0."""

    def __init__(self, runner: ModelRunner | None, device: torch.device, vocab_size: int) -> None:
        self.runner = runner
        self.device = device
        self.vocab_size = vocab_size

    @torch.inference_mode()
    def draw(self, plan: Plan) -> Draft | None:
        """Compute the draft K/V the plan asks for, and draft its chains; None when no row samples."""
        root_NV = self._catch_up(plan)
        rows = plan.sampling_rows
        if not rows:
            return None
        layout = Layout.of(rows)
        tokens_CL, table = self._draw_levels(rows, layout, root_NV)
        chains = Chains(
            tokens_CL,
            to_device(layout.length_C, self.device),
            to_device(layout.request_C, self.device),
            table,
            self._leads(rows, layout),
            _layers(rows, layout, self.device),
            (len(rows), int(layout.rank_C.max()) + 1),
        )
        return Draft(layout, chains, merge(plan, layout, tokens_CL))

    def keep(self, moves: Sequence[Moves]) -> None:
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

    def _catch_up(self, plan: Plan) -> Tensor:
        """Logits below the root of every speculating row, after computing all missing known tokens."""
        parts = [
            SequenceInput(
                row.draft_known,
                row.draft_first_index,
                row.block_ids,
                NO_NODES,
                slice(len(row.draft_known) - bool(row.branching), None),
                self._first_key(row),
            )
            for row in plan.rows
            if row.draft_known
        ]
        if not parts:
            return torch.empty((0, self.vocab_size), device=self.device)
        assert self.runner is not None, "a row speculates without a draft model"
        return self.runner.forward(parts)

    def _draw_levels(self, rows: Sequence[Row], layout: Layout, root_NV: Tensor) -> tuple[Tensor, LawTable]:
        """Draw all chains level by level; the tokens [C, L] and the laws they came from."""
        shape = (layout.num_chains, layout.max_length)
        tokens_CL = torch.zeros(shape, dtype=torch.int64, device=self.device)
        row_CL = np.zeros(shape, dtype=np.int64)
        for depth, level in enumerate(layout.levels):
            row_CL[:, depth] = level.law_row_C
        num_rows = layout.levels[-1].end_law_row if layout.levels else 0
        law_NV = torch.empty((num_rows, self.vocab_size), device=self.device)
        table = LawTable(law_NV, to_device(row_CL, self.device))
        if not shape[1]:
            return tokens_CL, table
        uniform_CL = to_device(
            uniform(
                layout.seed_C[:, None],
                layout.position_C[:, None],
                Purpose.DRAFT,
                layout.rank_C[:, None],
                np.arange(shape[1]),
            ),
            self.device,
        )
        parameters = LawParameters.of([row.sampling for row in rows], self.device)
        logits_NV = root_NV
        for depth, level in enumerate(layout.levels):
            if depth > 0:
                parents = to_device(level.parents, self.device)
                logits_NV = self._next_level(rows, tokens_CL[parents, depth - 1], depth)
            logits_NV = edit(logits_NV, _places(rows, level, tokens_CL, depth))
            below_NV = law_NV[level.first_law_row : level.end_law_row]
            below_NV.copy_(law(logits_NV, parameters.select(to_device(level.row_of_parent, self.device))))
            logits_NV = _race_stable(rows, level, depth, below_NV, logits_NV)
            self._draw_level(rows, level, depth, below_NV, logits_NV, tokens_CL[:, depth], uniform_CL[:, depth])
        return tokens_CL, table

    def _draw_level(
        self,
        rows: Sequence[Row],
        level: Level,
        depth: int,
        law_NV: Tensor,
        logits_NV: Tensor,
        tokens_C: Tensor,
        uniform_C: Tensor,
    ) -> None:
        """Draw the children of one level's parents into `tokens_C`, parents of one method and number together."""
        alike: dict[tuple[str, int], list[int]] = {}
        for number, row in enumerate(level.row_of_parent.tolist()):
            alike.setdefault(_method(rows[row], depth), []).append(number)
        for (method, count), numbers in alike.items():
            first_N = level.parents[numbers]
            apart_N = np.array(
                [rows[row].num_drafts // rows[row].widths[depth] for row in level.row_of_parent[numbers]]
            )
            chain_NK = to_device(first_N[:, None] + apart_N[:, None] * np.arange(count), self.device)
            index_N = to_device(np.asarray(numbers), self.device)
            weights_NV = (logits_NV if method == MOST_LIKELY else law_NV)[index_N]
            tokens_C[chain_NK] = children(method, weights_NV, uniform_C[chain_NK])
        if any(row.speculation.tree for row in rows):
            tokens_C.copy_(tokens_C[to_device(level.leader_C, self.device)])

    def _leads(self, rows: Sequence[Row], layout: Layout) -> Tensor | None:
        if not any(row.speculation.tree for row in rows):
            return None
        chain_C = np.arange(layout.num_chains)
        leads = [level.active_C & (level.leader_C == chain_C) for level in layout.levels]
        return to_device(np.stack(leads, 1), self.device) if leads else None

    def _next_level(self, rows: Sequence[Row], tokens_N: Tensor, depth: int) -> Tensor:
        """Logits below the nodes of `depth` of every row whose chains reach deeper; their tokens stay on the device."""
        assert self.runner is not None
        parts = []
        for row in rows:
            if row.draft_length <= depth:
                continue
            count = row.widths[depth - 1]
            nodes = Nodes(
                tokens=(0,) * count,
                depths=[depth] * count,
                cached_depths=[level for level in range(1, depth) for _ in range(row.widths[level - 1])],
                ancestry=_ancestry(row.branching[:depth]),
            )
            parts.append(SequenceInput((), row.end, row.block_ids, nodes, slice(None), self._first_key(row)))
        return self.runner.forward(parts, tokens_N)


def method_of(row: Row) -> str:
    """How the children of a row's nodes are drawn: as it asked, or the rule's own way."""
    return row.speculation.draft_method or RULES[row.speculation.rule].draft_methods[0]


def _method(row: Row, depth: int) -> tuple[str, int]:
    """(how, how many) children of the row's nodes of `depth` are drawn."""
    count, method = row.branching[depth], method_of(row)
    if count == 1 and not row.sampling.seed_stable:
        return "iid", 1
    if row.sampling.seed_stable or (row.sampling.is_greedy and method != "iid"):
        return MOST_LIKELY, count
    return method, count


@lru_cache(maxsize=1024)
def _ancestry(branching: tuple[int, ...]) -> np.ndarray:
    """[nodes of the last level, nodes of all levels]: which nodes are ancestors, or the node itself."""
    widths = level_widths(branching)
    node_N = np.arange(widths[-1])
    return np.concatenate([node_N[:, None] // (widths[-1] // width) == np.arange(width) for width in widths], axis=1)


def _places(rows: Sequence[Row], level: Level, tokens_CL: Tensor, depth: int) -> list[Place | None]:
    """Where the laws below a level's parents are, for the rows that edit their logits."""
    if not any(row.text for row in rows):
        return []
    paths = tokens_CL[to_device(level.parents, tokens_CL.device), :depth].tolist()
    places: list[Place | None] = []
    for number, path in zip(level.row_of_parent.tolist(), paths, strict=True):
        text = rows[number].text
        places.append(None if text is None else Place(rows[number].sampling, text, tuple(path)))
    return places


def _race_stable(rows: Sequence[Row], level: Level, depth: int, law_NV: Tensor, logits_NV: Tensor) -> Tensor:
    """For seed-stable rows: what orders their tokens instead of logits; their laws become the winner's, in place."""
    numbers = [n for n, row in enumerate(level.row_of_parent.tolist()) if rows[row].sampling.seed_stable]
    if not numbers:
        return logits_NV
    stable = [rows[row] for row in level.row_of_parent[numbers]]
    race_MV = race(law_NV[numbers], [row.sampling for row in stable], [row.end + depth for row in stable])
    law_NV[numbers] = winners_only(race_MV)
    order_NV = logits_NV.clone()
    order_NV[numbers] = race_MV.float()
    return order_NV


def _layers(rows: Sequence[Row], layout: Layout, device: torch.device) -> Layers | None:
    """The rows' pending target layers, by chain."""
    most = max(len(row.layers) for row in rows)
    if not most:
        return None
    remaining_RM, count_RM = np.zeros((len(rows), most), dtype=np.int64), np.ones((len(rows), most), dtype=np.int64)
    state_RM4 = np.zeros((len(rows), most, 4))
    for i, row in enumerate(rows):
        for j, layer in enumerate(row.layers):
            remaining_RM[i, j], count_RM[i, j], state_RM4[i, j] = layer.remaining, layer.num_chains, layer.state
    index_C = layout.request_C
    parts = (to_device(array[index_C], device) for array in (remaining_RM, state_RM4, count_RM))
    return Layers(*parts)
