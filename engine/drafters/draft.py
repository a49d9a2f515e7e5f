"""What a drafter hands on: the chains of all sampling rows, and their merged trees.

Host-side bookkeeping (which chain belongs to whom, how long it is) is numpy and known before
anything is drawn; only tokens and laws are tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Plan, Row
from engine.speculation.drafting import Chains
from engine.speculation.topology import Tree, merge_chains

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Layout:
    """Which chains a plan asks for; one chain of length 0 for a row that does not speculate."""

    request_C: Ints
    rank_C: Ints
    length_C: Ints
    seed_C: Ints
    position_C: Ints
    """Index of the first token the chain drafts: the position of its noise."""
    levels: tuple[Level, ...]
    """What is drawn, by depth."""

    @property
    def num_chains(self) -> int:
        """C."""
        return len(self.request_C)

    @property
    def max_length(self) -> int:
        """L."""
        return int(self.length_C.max(initial=0))

    @staticmethod
    def of(rows: Sequence[Row]) -> Layout:
        """The chains of the plan's sampling rows, in order."""
        counts = [max(1, row.num_drafts) for row in rows]
        request_C = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
        rank_C = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])

        def spread(values: list[int]) -> Ints:
            return np.repeat(np.asarray(values, dtype=np.int64), counts)

        return Layout(
            request_C,
            rank_C,
            length_C=spread([row.draft_length for row in rows]),
            seed_C=spread([row.sampling.seed for row in rows]),
            position_C=spread([row.end for row in rows]),
            levels=tuple(_levels(rows, np.asarray(counts, dtype=np.int64))),
        )


def _levels(rows: Sequence[Row], counts: Ints) -> Iterator[Level]:
    """Level by level: chains of a row are its leaves in order, so a node's chains lie side by side."""
    first_C = np.repeat(np.cumsum(counts) - counts, counts)
    count_C, chain_C = np.repeat(counts, counts), np.arange(int(counts.sum()), dtype=np.int64)
    row_C = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
    width_C, start = np.ones_like(chain_C), 0
    for depth in range(max(row.draft_length for row in rows)):
        branching = [row.branching[depth] if depth < row.draft_length else 1 for row in rows]
        active_C = np.repeat([depth < row.draft_length for row in rows], counts)
        below_C = width_C * np.repeat(np.asarray(branching, dtype=np.int64), counts)
        parent_C, leader_C = (
            first_C + (chain_C - first_C) // (count_C // w) * (count_C // w) for w in (width_C, below_C)
        )
        parents = np.flatnonzero((parent_C == chain_C) & active_C)
        number_C = np.zeros_like(chain_C)
        number_C[parents] = start + np.arange(len(parents))
        yield Level(
            active_C=active_C,
            leader_C=leader_C,
            law_row_C=np.where(active_C, number_C[parent_C], 0),
            parents=parents,
            row_of_parent=row_C[parents],
            first_law_row=start,
        )
        width_C, start = below_C, start + len(parents)


@dataclass(frozen=True)
class Level:
    """The drafted nodes of one depth, and the nodes they are drawn below (their parents)."""

    active_C: Bools
    """Which chains reach this depth."""
    leader_C: Ints
    """First chain through the same node."""
    law_row_C: Ints
    """Row, in the table of draft laws, of the law below the chain's parent."""
    parents: Ints
    """First chain through each parent; their laws are the rows from `first_law_row` on."""
    row_of_parent: Ints
    """Index among the sampling rows."""
    first_law_row: int

    @property
    def end_law_row(self) -> int:
        """Row after the last."""
        return self.first_law_row + len(self.parents)


@dataclass(frozen=True)
class Draft:
    """The drafted chains of a step."""

    layout: Layout
    chains: Chains
    trees: tuple[Tree, ...]
    """One tree per sampling row: its drawn chains, then its copied ones; without nodes where it does not speculate."""


def merge(plan: Plan, layout: Layout, tokens_CL: torch.Tensor) -> tuple[Tree, ...]:
    """The tree of every sampling row. The one place of a step where drafted tokens come to the host."""
    chains: list[list[list[int]]] = [[] for _ in plan.sampling_rows]
    tokens = tokens_CL.tolist() if layout.max_length else [[]] * layout.num_chains
    rows = zip(tokens, layout.request_C, layout.length_C, strict=True)
    for chain, request, length in rows:
        chains[request].append(chain[:length])
    for of_row, row in zip(chains, plan.sampling_rows, strict=True):
        of_row += [list(copy.tokens) for copy in row.copies]
    return tuple(merge_chains(of_row) for of_row in chains)
