"""Drafts chains with a small model: one pass to catch up, one more per further level.

The draft model's K/V has the same blocks as the target's. Below the root, level by level, the K
nodes of depth d lie behind each other: chain k's node of depth d sits at index
end + (d - 1) * K + k. Chains are not merged here: every chain has nodes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.drafters.draft import Draft, Layout, merge
from engine.execution.inputs import NO_NODES, Nodes, SequenceInput
from engine.execution.runner import ModelRunner
from engine.plan import Plan, Row
from engine.sampling.draw import categorical
from engine.sampling.law import LawParameters, law
from engine.sampling.noise import Purpose, uniform
from engine.speculation.drafting import Chains, LawTable, first_tokens
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
        tokens_CL, table = self._levels(rows, layout, root_NV)
        chains = Chains(
            tokens_CL,
            torch.from_numpy(layout.length_C).to(self.device),
            torch.from_numpy(layout.request_C).to(self.device),
            torch.from_numpy(layout.rank_C).to(self.device),
            table,
        )
        return Draft(layout, chains, merge(plan, layout, tokens_CL))

    def keep(self, moves: Sequence[tuple[int, int]]) -> None:
        """Make accepted K/V contiguous in the draft model's storage."""
        if self.runner is not None:
            self.runner.keep(moves)

    @staticmethod
    def node_index(row: Row, chain: int, depth: int) -> int:
        """Index, in the sequence, of the draft K/V of a chain's node (depth 1 is the first drafted token)."""
        return row.end + (depth - 1) * row.num_drafts + chain

    def _catch_up(self, plan: Plan) -> Tensor:
        """Logits below the root of every speculating row, after computing all missing known tokens."""
        parts = [
            SequenceInput(
                row.draft_known,
                row.draft_first_index,
                row.block_ids,
                NO_NODES,
                slice(len(row.draft_known) - (row.num_drafts > 0), None),
            )
            for row in plan.rows
            if row.draft_known
        ]
        if not parts:
            return torch.empty((0, self.vocab_size), device=self.device)
        assert self.runner is not None, "a row speculates without a draft model"
        return self.runner.forward(parts)

    def _levels(self, rows: Sequence[Row], layout: Layout, root_NV: Tensor) -> tuple[Tensor, LawTable]:
        """Draw all chains level by level; the tokens [C, L] and the laws they came from."""
        shape = (layout.num_chains, layout.max_length)
        tokens_CL = torch.zeros(shape, dtype=torch.int64, device=self.device)
        levels = _law_rows(rows, layout)
        row_CL = torch.from_numpy(levels.row_CL).to(self.device)
        law_NV = torch.empty((levels.num_rows, self.vocab_size), device=self.device)
        table = LawTable(law_NV, row_CL)
        if not shape[1]:
            return tokens_CL, table
        speculating = [row for row in rows if row.num_drafts]
        uniform_CL = torch.from_numpy(
            uniform(
                layout.seed_C[:, None],
                layout.position_C[:, None],
                Purpose.DRAFT,
                layout.rank_C[:, None],
                np.arange(shape[1]),
            )
        ).to(self.device)
        parameters = LawParameters.of([row.sampling for row in speculating], self.device)
        law_NV[: len(speculating)] = law(root_NV, parameters)
        self._draw_first(speculating, layout, law_NV, tokens_CL, uniform_CL)
        for depth in range(1, shape[1]):
            active = torch.from_numpy(np.flatnonzero(layout.length_C > depth)).to(self.device)
            start, stop = levels.bounds[depth]
            logits_NV = self._next_level(speculating, tokens_CL[active, depth - 1], depth)
            law_NV[start:stop] = law(logits_NV, parameters.select(levels.speculating_at(depth, self.device)))
            tokens_CL[active, depth] = categorical(law_NV[row_CL[active, depth]], uniform_CL[active, depth])
        return tokens_CL, table

    def _draw_first(
        self, speculating: Sequence[Row], layout: Layout, law_NV: Tensor, tokens_CL: Tensor, uniform_CL: Tensor
    ) -> None:
        """Draw the first tokens of all chains, requests of one method and chain count together."""
        chains = np.split(np.flatnonzero(layout.length_C > 0), np.cumsum([row.num_drafts for row in speculating])[:-1])
        alike: dict[tuple[str, int], list[int]] = {}
        for number, row in enumerate(speculating):
            method = row.draft_method or RULES[row.rule].draft_methods[0]
            alike.setdefault((method, row.num_drafts), []).append(number)
        for (method, _), numbers in alike.items():
            chain_NK = torch.from_numpy(np.stack([chains[number] for number in numbers])).to(self.device)
            roots_N = torch.tensor(numbers, device=self.device)
            tokens_CL[chain_NK, 0] = first_tokens(method, law_NV[roots_N], uniform_CL[chain_NK, 0])

    def _next_level(self, speculating: Sequence[Row], tokens_N: Tensor, depth: int) -> Tensor:
        """Logits below the nodes of `depth` of every row whose chains reach deeper."""
        assert self.runner is not None
        tokens = tokens_N.tolist()
        parts = []
        start = 0
        for row in speculating:
            if row.draft_length <= depth:
                continue
            count = row.num_drafts
            nodes = Nodes(
                tokens=tokens[start : start + count],
                depths=[depth] * count,
                cached_depths=[level for level in range(1, depth) for _ in range(count)],
                ancestry=np.tile(np.eye(count, dtype=np.bool_), (1, depth)),
            )
            parts.append(SequenceInput((), row.end, row.block_ids, nodes, slice(None)))
            start += count
        return self.runner.forward(parts)


@dataclass(frozen=True)
class _LawRows:
    """Which row of the law table each chain uses at each depth.

    At depth 0 all chains of a request share one row; deeper every chain has its own.
    """

    row_CL: np.ndarray
    bounds: list[tuple[int, int]]
    """Half-open range of table rows by depth."""
    speculating: list[np.ndarray]
    """By depth, the index among speculating rows behind each table row."""
    num_rows: int

    def speculating_at(self, depth: int, device: torch.device) -> Tensor:
        """Index among the speculating rows, for each law row of `depth`."""
        return torch.from_numpy(self.speculating[depth]).to(device)


def _law_rows(rows: Sequence[Row], layout: Layout) -> _LawRows:
    rank = np.cumsum([row.num_drafts > 0 for row in rows]) - 1
    num_roots = int(rank[-1]) + 1
    row_CL = np.zeros((layout.num_chains, layout.max_length), dtype=np.int64)
    bounds, speculating, stop = [], [], 0
    for depth in range(layout.max_length):
        active = np.flatnonzero(layout.length_C > depth)
        behind = rank[layout.request_C[active]]
        start = stop
        if depth == 0:
            row_CL[active, 0] = behind
            stop = num_roots
            behind = np.arange(num_roots)
        else:
            row_CL[active, depth] = start + np.arange(len(active))
            stop = start + len(active)
        bounds.append((start, stop))
        speculating.append(behind)
    return _LawRows(row_CL, bounds, speculating, stop)
