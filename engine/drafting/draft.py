"""Result of drafting: chains of all sampling rows, their merged trees, and the random numbers.

The owner and length of each chain, and the parent of each node, depend on the rows' shapes alone.
So a `Layout` is created once for rows of these shapes, before anything is drawn, and cached. Only
tokens and distributions are new in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.fanout import Fanout, chains_through, num_chains, width_at
from engine.kernels.protocol import ChainNoise, Chains
from engine.kernels.transfer import to_device
from engine.plan import Plan, Row
from engine.sampling.distribution import DistributionParameters
from engine.speculation.drafting import method_below
from engine.speculation.rule_facts import MOST_LIKELY
from engine.speculation.topology import Tree, drawn_tree, merge_chains
from engine.speculation.verification import RULES

MOST_UNMERGED = 64
"""Largest target pass (roots plus nodes) on a device in which equal nodes are not merged.

The host then does not wait for drafted tokens. So few rows should take about as long as
one (not measured yet).
"""

Ints = npt.NDArray[np.int64]


class ChainShape(NamedTuple):
    """Drafts of a row."""

    fanout: Fanout
    method: str
    only_child_method: str
    """Method for a node with one child."""

    @staticmethod
    def of(row: Row) -> ChainShape:
        """Return the shape of a row's drawn chains."""
        sampling = row.sampling
        return _shape_of(row.fanout, method_of(row), sampling.seed_stable, sampling.is_greedy)

    @property
    def num_chains(self) -> int:
        return num_chains(self.fanout)

    @property
    def length(self) -> int:
        return len(self.fanout)


@lru_cache(maxsize=1024)
def _shape_of(fanout: Fanout, method: str, stable: bool, greedy: bool) -> ChainShape:
    only_child_method = MOST_LIKELY if stable else method_below(method, 1)
    if stable or (greedy and method != "iid"):
        method = MOST_LIKELY
    return ChainShape(fanout, method, only_child_method)


def method_of(row: Row) -> str:
    """Return the method of drawing a row's nodes: the requested method, or the rule's own."""
    speculation = row.speculation
    return speculation.draft_method or RULES[speculation.rule].draft_methods[0]


@dataclass(frozen=True)
class Draw:
    """Parents of one level whose children are drawn in one call."""

    method: str
    parent_N: Tensor | None
    """Index of each parent in the level; None for all in order."""
    chain_NK: Tensor | None
    """First chain through each drawn child; None if the children are all chains in order."""
    shape: tuple[int, int]

    def child_values(self, value_C: Tensor) -> Tensor:
        """Return [N, K] the children's values among the chains' values.

        A view if the children are all chains.
        """
        if self.chain_NK is None:
            return value_C.view(self.shape)
        return value_C[self.chain_NK]

    def set_children(self, value_C: Tensor, value_NK: Tensor) -> None:
        if self.chain_NK is None:
            value_C.view(self.shape).copy_(value_NK)
        else:
            value_C[self.chain_NK] = value_NK


@dataclass(frozen=True)
class Level:
    """Drafted nodes of one depth, and their parents: the nodes below which they are drawn."""

    chain_N: Tensor | slice
    """First chain through each parent; a slice if the parents are all chains."""
    row_N: Ints
    """Index of each parent's sampling row."""
    distributions: slice
    """Rows of the parents in the table of draft distributions."""
    draws: tuple[Draw, ...]
    leader_C: Tensor | None
    """First chain through each chain's node; None if no node is shared."""


@dataclass(frozen=True)
class NodeTable:
    """The N roots and nodes of a step, tree by tree."""

    starts: Ints
    """Index of each tree's root, before its nodes; and the end."""
    node_CX: Tensor
    """[C, L + 1] node below the first i tokens of each drawn chain; the root beyond a chain's end.

    On the device.
    """
    tree_depths: Sequence[Sequence[int]]

    @staticmethod
    def of(trees: Sequence[Tree], layout: Layout) -> NodeTable:
        """Build the table. trees: of the layout's rows; their drawn chains come first."""
        most_nodes = layout.max_length + 1
        starts = [0]
        paths = []
        for tree, count in zip(trees, layout.counts, strict=True):
            start = starts[-1]
            for path in tree.paths[:count]:
                padding = [start] * (most_nodes - len(path))
                paths.append([start + node for node in path] + padding)
            starts.append(start + 1 + tree.num_nodes)
        node_CX = to_device(np.array(paths, dtype=np.int64), layout.request.device)
        return NodeTable(np.array(starts), node_CX, [tree.depths for tree in trees])

    @cached_property
    def rows(self) -> Ints:
        return np.repeat(np.arange(len(self.tree_depths)), np.diff(self.starts))

    @cached_property
    def depths(self) -> Ints:
        return np.array([depth for depths in self.tree_depths for depth in (0, *depths)])

    @cached_property
    def row(self) -> Tensor:
        return to_device(self.rows, self.node_CX.device)


@dataclass(frozen=True, eq=False)  # cached, and compared by identity
class Layout:
    """Chains that a step drafts; one chain of length 0 for a row that draws none."""

    request_C: Ints
    """Sampling row of each chain."""
    rank_C: Ints
    length_C: Ints
    max_length: int
    levels: tuple[Level, ...]
    probs_row_of_N: Tensor
    """Sampling row of each draft distribution."""
    request: Tensor
    """`request_C` on the device."""
    length: Tensor
    """`length_C` on the device."""
    probs_row_CL: Tensor
    """Row of each drafted token in the table of draft distributions, on the device."""
    leader_LC: Tensor | None
    """First chain through each chain's node; None if no node is shared."""
    leads_CL: Tensor | None
    """Whether a chain is the first through its node; None if no node is shared."""
    are_independent: bool
    """Whether each drawn token depends on its distribution and its own number alone."""
    shape: tuple[int, int]
    """(rows, most chains of a row)."""
    trees: tuple[Tree, ...]
    node_M: Tensor
    """Index of each node's token in the flattened tokens of the chains, row by row."""

    @property
    def num_chains(self) -> int:
        return len(self.request_C)

    @property
    def num_probs(self) -> int:
        """Return the number of draft distributions, one for each node with drafted children."""
        return len(self.probs_row_of_N)

    @cached_property
    def counts(self) -> list[int]:
        counts: list[int] = np.bincount(self.request_C).tolist()
        return counts

    @cached_property
    def nodes(self) -> NodeTable:
        """Return the table of the drawn trees, which the steps of this layout share read-only."""
        return NodeTable.of(self.trees, self)


@lru_cache(maxsize=128)  # a layout of many rows takes a tenth of a megabyte
def layout_of(shapes: tuple[ChainShape, ...], device: torch.device) -> Layout:
    """Return the chains of sampling rows of these shapes, in order."""
    counts = np.array([shape.num_chains for shape in shapes], dtype=np.int64)
    lengths = np.array([shape.length for shape in shapes], dtype=np.int64)
    request_C = np.repeat(np.arange(len(shapes)), counts)
    length_C = np.repeat(lengths, counts)
    index_C = np.arange(len(request_C))
    max_length = int(lengths.max())
    probs_row_CL = np.zeros((len(index_C), max_length), dtype=np.int64)
    levels = tuple(_levels(shapes, counts, probs_row_CL, device))
    probs_row_of_N = np.concatenate([np.zeros(0, np.int64), *(level.row_N for level in levels)])
    trees = tuple(drawn_tree(shape.fanout) for shape in shapes)
    leader_LC = None
    leads_CL = None
    if any(level.leader_C is not None for level in levels):
        chain_C = to_device(index_C, device)
        leaders = [chain_C if level.leader_C is None else level.leader_C for level in levels]
        leader_LC = torch.stack(leaders)
        is_drafted_CL = to_device(np.arange(max_length) < length_C[:, None], device)
        leads_CL = torch.eq(leader_LC, chain_C).T.contiguous() & is_drafted_CL
    return Layout(
        request_C=request_C,
        rank_C=index_C - (np.cumsum(counts) - counts)[request_C],
        length_C=length_C,
        max_length=max_length,
        levels=levels,
        probs_row_of_N=to_device(probs_row_of_N, device),
        request=to_device(request_C, device),
        length=to_device(length_C, device),
        probs_row_CL=to_device(probs_row_CL, device),
        leader_LC=leader_LC,
        leads_CL=leads_CL,
        are_independent=all(draw.method == "iid" for level in levels for draw in level.draws),
        shape=(len(shapes), int(counts.max())),
        trees=trees,
        node_M=to_device(_places(trees, max_length), device),
    )


def _places(trees: Sequence[Tree], max_length: int) -> Ints:
    """Return [M] the index of each node's token in [C, L], flat: in the first chain through it."""
    places = []
    chain = 0
    for tree in trees:
        place_by_node: dict[int, int] = {}
        for path in tree.paths:
            for depth, node in enumerate(path[1:]):
                place_by_node.setdefault(node, chain * max_length + depth)
            chain += 1
        places += [place_by_node[node] for node in range(1, 1 + tree.num_nodes)]
    return np.array(places, dtype=np.int64)


def _levels(shapes: Sequence[ChainShape], counts: Ints, probs_row_CL: Ints, device: torch.device) -> Iterator[Level]:
    """Yield the levels; chains of a node are contiguous, because they are its leaves in order.

    probs_row_CL: output.
    """
    first_R = np.cumsum(counts) - counts
    num_chains, max_length = probs_row_CL.shape
    num_probs = 0
    for depth in range(max_length):
        parents: list[Ints] = []
        rows: list[int] = []
        chains_per_child: list[int] = []
        parents_by_draw: dict[tuple[str, int], list[int]] = {}
        leader_C = np.arange(num_chains)
        for number, shape in enumerate(shapes):
            if depth >= shape.length:
                continue
            first = first_R[number]
            above = chains_through(shape.fanout, depth)
            below = chains_through(shape.fanout, depth + 1)
            num_parents = width_at(shape.fanout, depth)
            num_children = shape.fanout[depth]
            rank = np.arange(shape.num_chains)
            row_chains = slice(first, first + shape.num_chains)
            probs_row_CL[row_chains, depth] = num_probs + len(rows) + rank // above
            leader_C[row_chains] = first + rank // below * below
            method = shape.method if num_children > 1 else shape.only_child_method
            drawing = parents_by_draw.setdefault((method, num_children), [])
            drawing += range(len(rows), len(rows) + num_parents)
            parents.append(first + np.arange(num_parents) * above)
            chains_per_child += [below] * num_parents
            rows += [number] * num_parents
        chain_N = np.concatenate(parents)
        below_N = np.array(chains_per_child, dtype=np.int64)
        draws = []
        for (method, num_children), drawing in parents_by_draw.items():
            first_N1 = chain_N[drawing][:, None]
            chain_NK = first_N1 + below_N[drawing][:, None] * np.arange(num_children)
            parent_N = _unless_all(np.array(drawing), len(chain_N), device)
            chains = _unless_all(chain_NK, num_chains, device)
            draws.append(Draw(method, parent_N, chains, chain_NK.shape))
        first_chains = _unless_all(chain_N, num_chains, device)
        yield Level(
            chain_N=slice(None) if first_chains is None else first_chains,
            row_N=np.array(rows),
            distributions=slice(num_probs, num_probs + len(rows)),
            draws=tuple(draws),
            leader_C=_unless_all(leader_C, num_chains, device),
        )
        num_probs += len(rows)


def _unless_all(indices: Ints, count: int, device: torch.device) -> Tensor | None:
    """Return indices on the device; None if they are all indices below `count`, in order."""
    if indices.size == count and bool((indices.ravel() == np.arange(count)).all()):
        return None
    return to_device(indices, device)


@dataclass(frozen=True)
class Draft:
    """Drafted chains of a step."""

    layout: Layout
    chains: Chains
    trees: tuple[Tree, ...]
    """Tree of each sampling row: drawn chains, then text drafts."""
    tokens_M: Tensor | None
    """Tokens of all nodes, tree by tree; None if the trees have them."""
    parameters: DistributionParameters
    numbers: Tensor
    """[6, C, L] random numbers by purpose (`drafting.numbers.draw_numbers`)."""
    rows_apart: int | None = None
    """Distance between the roots of two sampling rows among the logits, if rows are padded."""

    @cached_property
    def noise(self) -> ChainNoise:
        """Return the random numbers of the rules."""
        return ChainNoise.of(self.numbers, self.layout.max_length)

    @cached_property
    def nodes(self) -> NodeTable:
        """Return the table of the trees.

        It is the layout's table, unless nodes were merged or there are text drafts.
        """
        # Merged trees have other lists: `is` distinguishes them from drawn trees with equal
        # parents.
        pairs = zip(self.trees, self.layout.trees, strict=True)
        if all(tree.parents is drawn.parents for tree, drawn in pairs):
            return self.layout.nodes
        return NodeTable.of(self.trees, self.layout)

    @property
    def starts(self) -> Ints:
        """Return the index of each sampling row's root among all nodes, and the end.

        The nodes of a row follow its root.
        """
        if self.rows_apart is None:
            return self.nodes.starts
        return np.arange(len(self.trees) + 1) * self.rows_apart


def with_tokens(draft: Draft, tokens: Sequence[int]) -> Draft:
    """Return the draft with tokens in its trees. tokens: of all nodes, tree by tree."""
    left = iter(tokens)
    trees = [tree._replace(tokens=list(islice(left, tree.num_nodes))) for tree in draft.trees]
    return replace(draft, trees=tuple(trees), tokens_M=None)


def trees_of(
    plan: Plan, layout: Layout, tokens_CL: Tensor, most_unmerged: int
) -> tuple[tuple[Tree, ...], Tensor | None]:
    """Return (the tree of each sampling row, the tokens of their nodes if the trees have none).

    most_unmerged: largest pass (roots plus nodes) without merging, for which the
    host does not wait.
    """
    rows = plan.sampling_rows
    num_nodes = len(layout.node_M)
    if num_nodes == 0 and not any(row.text_drafts for row in rows):
        return layout.trees, None
    needs_tokens = any(row.text_drafts or row.needs_path for row in rows)
    if needs_tokens or len(rows) + num_nodes > most_unmerged:
        return merge(plan, layout, tokens_CL), None
    return layout.trees, tokens_CL.take(layout.node_M)


def merge(plan: Plan, layout: Layout, tokens_CL: torch.Tensor) -> tuple[Tree, ...]:
    """Return the merged tree of every sampling row; waits for the device, which drafts tokens."""
    rows = plan.sampling_rows
    tokens = tokens_CL.tolist() if layout.max_length else [[]] * layout.num_chains
    if layout.shape[1] == 1 and not any(row.text_drafts for row in rows):
        # With single chains, the drawn tree already has the nodes.
        pairs = zip(tokens, layout.trees, strict=True)
        return tuple([Tree(chain[: len(tree.parents)], *tree[1:]) for chain, tree in pairs])
    chains_by_row: list[list[list[int]]] = [[] for _ in rows]
    requests = layout.request_C.tolist()
    lengths = layout.length_C.tolist()
    for chain, request, length in zip(tokens, requests, lengths, strict=True):
        chains_by_row[request].append(chain[:length])
    for row_chains, row in zip(chains_by_row, rows, strict=True):
        row_chains += [list(draft.tokens) for draft in row.text_drafts]
    return tuple(merge_chains(row_chains) for row_chains in chains_by_row)
