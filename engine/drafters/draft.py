"""What a drafter hands on: the chains of all sampling rows, and their merged trees.

Host-side bookkeeping (which chain belongs to whom, how long it is) is numpy and known before
anything is drawn; only tokens and laws are tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Plan, Row
from engine.speculation.drafting import Chains
from engine.speculation.topology import Tree, merge_chains

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Which chains a plan asks for; one chain of length 0 for a row that does not speculate."""

    request_C: Ints
    rank_C: Ints
    length_C: Ints
    seed_C: Ints
    position_C: Ints
    """Index of the first token the chain drafts: the position of its noise."""

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
            length_C=spread([row.draft_length if row.num_drafts else 0 for row in rows]),
            seed_C=spread([row.sampling.seed for row in rows]),
            position_C=spread([row.end for row in rows]),
        )


@dataclass(frozen=True)
class Draft:
    """The drafted chains of a step."""

    layout: Layout
    chains: Chains
    trees: tuple[Tree, ...]
    """One tree per sampling row; without nodes where the row does not speculate."""


def merge(plan: Plan, layout: Layout, tokens_CL: torch.Tensor) -> tuple[Tree, ...]:
    """The tree of every sampling row. The one place of a step where drafted tokens come to the host."""
    chains: list[list[list[int]]] = [[] for _ in plan.sampling_rows]
    rows = zip(tokens_CL.tolist(), layout.request_C, layout.length_C, strict=True)
    for tokens, request, length in rows:
        chains[request].append(tokens[:length])
    return tuple(merge_chains(of_row) for of_row in chains)
