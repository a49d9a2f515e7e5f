"""Result of drafting: the chains of all sampling rows, their merged trees, and the step's random numbers.

The owner and length of each chain, and the parent of each node, depend on the rows' shapes alone. So a `Layout` is
created once for rows of these shapes, before anything is drawn, and cached. Only tokens and distributions are new in
every step.
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

from engine.drafting.numbers import noise_of
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
"""Largest target pass (roots plus nodes) on a device in which equal nodes are not merged, so that the host need not
wait for the drafted tokens. A pass over this few rows is expected to take about as long as over one (not measured
yet).
"""

Ints = npt.NDArray[np.int64]


class ChainShape(NamedTuple):
    """Drafts of a row."""

    fanout: Fanout
    method: str
    """Method of drawing several children of a node."""
    method_of_one: str
    """Method of drawing the only child of a node."""

    @staticmethod
    def of(row: Row) -> ChainShape:
        return _shape_of(row.fanout, method_of(row), row.sampling.seed_stable, row.sampling.is_greedy)

    @property
    def num_chains(self) -> int:
        return num_chains(self.fanout)

    @property
    def length(self) -> int:
        """Return the number of tokens in a chain."""
        return len(self.fanout)


@lru_cache(maxsize=1024)
def _shape_of(fanout: Fanout, method: str, stable: bool, greedy: bool) -> ChainShape:
    likeliest = stable or (greedy and method != "iid")
    of_one = MOST_LIKELY if stable else method_below(method, 1)
    return ChainShape(fanout, MOST_LIKELY if likeliest else method, of_one)


def method_of(row: Row) -> str:
    """Return the method of drawing a row's nodes: the requested one, or the rule's own."""
    return row.speculation.draft_method or RULES[row.speculation.rule].draft_methods[0]


@dataclass(frozen=True)
class Draw:
    """Parents of one level whose children are drawn in one call."""

    method: str
    parent_N: Tensor | None
    """Indices of the parents in the level; None for all parents in order."""
    chain_NK: Tensor | None
    """First chain through each of their children; None if these are all chains in order."""
    shape: tuple[int, int]
    """(N, K)."""

    def of_children(self, value_C: Tensor) -> Tensor:
        """Return [N, K] the children's values among those of all chains; a view if they are all chains."""
        return value_C.view(self.shape) if self.chain_NK is None else value_C[self.chain_NK]

    def set_children(self, value_C: Tensor, value_NK: Tensor) -> None:
        """Write the children's values, in place."""
        if self.chain_NK is None:
            value_C.view(self.shape).copy_(value_NK)
        else:
            value_C[self.chain_NK] = value_NK


@dataclass(frozen=True)
class Level:
    """Drafted nodes of one depth, and their parents: the nodes below which they are drawn."""

    chain_N: Tensor | slice
    """First chain through each parent; a slice if these are all chains."""
    row_N: Ints
    """Number of each parent's row, among the sampling rows."""
    distributions: slice
    """Rows of the parents in the table of draft distributions."""
    draws: tuple[Draw, ...]
    leader_C: Tensor | None
    """First chain through each chain's node; None if no two chains share one."""


@dataclass(frozen=True)
class NodeTable:
    """The N roots and nodes of a step, tree by tree."""

    starts: Ints
    """Index of the root of each sampling row, followed by its nodes; and the end."""
    node_CX: Tensor
    """[C, L + 1] node below the first i tokens of each drawn chain; the root beyond a chain's end. On the device."""
    of_trees: Sequence[Sequence[int]]
    """Depths of the nodes of each tree, without its root."""

    @staticmethod
    def of(trees: Sequence[Tree], layout: Layout) -> NodeTable:
        """Build the table; trees: of the layout's rows; their drawn chains come first."""
        starts, paths, most = [0], [], layout.max_length + 1
        for tree, count in zip(trees, layout.counts, strict=True):
            start = starts[-1]
            for path in tree.paths[:count]:
                paths.append([start + node for node in path] + [start] * (most - len(path)))
            starts.append(start + 1 + tree.num_nodes)
        node_CX = to_device(np.array(paths, dtype=np.int64), layout.request.device)
        return NodeTable(np.array(starts), node_CX, [tree.depths for tree in trees])

    @cached_property
    def rows(self) -> Ints:
        """Return [N] the number of the sampling row."""
        return np.repeat(np.arange(len(self.of_trees)), np.diff(self.starts))

    @cached_property
    def depths(self) -> Ints:
        """Return [N] the depth of each, 0 of roots."""
        return np.array([depth for of_tree in self.of_trees for depth in (0, *of_tree)])

    @cached_property
    def row(self) -> Tensor:
        """Return `rows` on the device."""
        return to_device(self.rows, self.node_CX.device)


@dataclass(frozen=True, eq=False)  # cached, and compared by identity
class Layout:
    """Chains that a step drafts; one chain of length 0 for a row that draws none."""

    request_C: Ints
    """Number of the chain's sampling row."""
    rank_C: Ints
    """Number of the chain within its row."""
    length_C: Ints
    max_length: int
    """L."""
    levels: tuple[Level, ...]
    probs_row_of_N: Tensor
    """Number of the sampling row of each row in the table of draft distributions."""
    # The same for the rules, on the device.
    request: Tensor
    length: Tensor
    probs_row_CL: Tensor
    """Row, in the table of draft distributions, of the distribution below each chain's parent node."""
    leader_LC: Tensor | None
    """First chain through each chain's node; None if no two chains share one."""
    leads_CL: Tensor | None
    """Whether the chain is the first through its node; None if no two chains share one."""
    are_independent: bool
    """Whether each drawn token depends on its distribution and its own number alone."""
    shape: tuple[int, int]
    """(rows, most chains of one)."""
    trees: tuple[Tree, ...]
    """Tree of each row's draws."""
    node_M: Tensor
    """Index of each node's token in the chains' tokens, flat, for all nodes of the trees, row by row."""

    @property
    def num_chains(self) -> int:
        return len(self.request_C)

    @property
    def num_probs(self) -> int:
        """Return the number of draft distributions: one for every node that has drafted children."""
        return len(self.probs_row_of_N)

    @cached_property
    def counts(self) -> list[int]:
        counts: list[int] = np.bincount(self.request_C).tolist()
        return counts

    @cached_property
    def nodes(self) -> NodeTable:
        """Return the table of the drawn trees; cached for all steps of this layout, so it is read-only."""
        return NodeTable.of(self.trees, self)


@lru_cache(maxsize=128)  # a layout of many rows takes a tenth of a megabyte
def layout_of(shapes: tuple[ChainShape, ...], device: torch.device) -> Layout:
    """Return the chains of sampling rows of these shapes, in order."""
    counts = np.array([shape.num_chains for shape in shapes], dtype=np.int64)
    lengths = np.array([shape.length for shape in shapes], dtype=np.int64)
    request_C, length_C = np.repeat(np.arange(len(shapes)), counts), np.repeat(lengths, counts)
    chain_C = np.arange(len(request_C))
    max_length = int(lengths.max())
    probs_row_CL = np.zeros((len(chain_C), max_length), dtype=np.int64)
    levels = tuple(_levels(shapes, counts, probs_row_CL, device))
    trees = tuple(drawn_tree(shape.fanout) for shape in shapes)
    leader_LC = leads_CL = None
    if any(level.leader_C is not None for level in levels):
        own_C = to_device(chain_C, device)
        leader_LC = torch.stack([own_C if level.leader_C is None else level.leader_C for level in levels])
        is_drafted_CL = to_device(np.arange(max_length) < length_C[:, None], device)
        leads_CL = torch.eq(leader_LC, own_C).T.contiguous() & is_drafted_CL
    return Layout(
        request_C=request_C,
        rank_C=chain_C - (np.cumsum(counts) - counts)[request_C],
        length_C=length_C,
        max_length=max_length,
        levels=levels,
        probs_row_of_N=to_device(np.concatenate([np.zeros(0, np.int64), *(level.row_N for level in levels)]), device),
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
    """Return [M] the place of each node's token in [C, L], flat: in the first chain through it."""
    places = []
    chain = 0
    for tree in trees:
        of_node: dict[int, int] = {}
        for path in tree.paths:
            for depth, node in enumerate(path[1:]):
                of_node.setdefault(node, chain * max_length + depth)
            chain += 1
        places += [of_node[node] for node in range(1, 1 + tree.num_nodes)]
    return np.array(places, dtype=np.int64)


def _levels(shapes: Sequence[ChainShape], counts: Ints, probs_row_CL: Ints, device: torch.device) -> Iterator[Level]:
    """Return the levels. Chains of a row are its leaves in order, so a node's chains are contiguous.

    probs_row_CL: output.
    """
    first = np.cumsum(counts) - counts
    num_probs = 0
    for depth in range(probs_row_CL.shape[1]):
        parents: list[Ints] = []
        rows: list[int] = []
        alike: dict[str, dict[int, list[int]]] = {}
        leader_C = np.arange(len(probs_row_CL))
        shares = False
        for number, shape in enumerate(shapes):
            if depth >= shape.length:
                continue
            apart, below = chains_through(shape.fanout, depth), chains_through(shape.fanout, depth + 1)
            num_parents = width_at(shape.fanout, depth)
            mine = slice(first[number], first[number] + shape.num_chains)
            probs_row_CL[mine, depth] = num_probs + len(rows) + np.arange(shape.num_chains) // apart
            leader_C[mine] = first[number] + np.arange(shape.num_chains) // below * below
            shares |= below > 1
            count = shape.fanout[depth]
            drawing = alike.setdefault(shape.method if count > 1 else shape.method_of_one, {}).setdefault(count, [])
            drawing += range(len(rows), len(rows) + num_parents)
            parents.append(first[number] + np.arange(num_parents) * apart)
            rows += [number] * num_parents
        chain_N = np.concatenate(parents)
        below_N = np.array([chains_through(shapes[row].fanout, depth + 1) for row in rows])
        yield Level(
            chain_N=slice(None) if _are_all(chain_N, len(leader_C)) else to_device(chain_N, device),
            row_N=np.array(rows),
            distributions=slice(num_probs, num_probs + len(rows)),
            draws=tuple(
                _draw_of(method, numbers, chain_N, below_N, count, len(leader_C), device)
                for method, by_count in alike.items()
                for count, numbers in by_count.items()
            ),
            leader_C=to_device(leader_C, device) if shares else None,
        )
        num_probs += len(rows)


def _draw_of(
    method: str, numbers: Sequence[int], chain_N: Ints, below_N: Ints, count: int, num_chains: int, device: torch.device
) -> Draw:
    """Return the draw of `count` children below these parents; below_N: chains through each child."""
    chain_NK = chain_N[numbers][:, None] + below_N[numbers][:, None] * np.arange(count)
    return Draw(
        method,
        None if len(numbers) == len(chain_N) else to_device(np.array(numbers), device),
        None if _are_all(chain_NK, num_chains) else to_device(chain_NK, device),
        (len(numbers), count),
    )


def _are_all(chains: Ints, num_chains: int) -> bool:
    """Whether these are all chains in order."""
    return chains.size == num_chains and bool((chains.ravel() == np.arange(num_chains)).all())


@dataclass(frozen=True)
class Draft:
    """Drafted chains of a step."""

    layout: Layout
    chains: Chains
    trees: tuple[Tree, ...]
    """One tree per sampling row: its drawn chains, then its text drafts; without nodes if it does not speculate."""
    tokens_M: Tensor | None
    """Tokens of all nodes, tree by tree, if the trees have none because the host did not wait for them."""
    parameters: DistributionParameters
    """Parameters of the sampling rows."""
    numbers: Tensor
    """[6, C, L] random numbers by purpose (`drafting.numbers.draw_numbers`)."""
    rows_apart: int | None = None
    """Distance between the roots of two sampling rows among the logits, if the step has padded its rows."""

    @cached_property
    def noise(self) -> ChainNoise:
        return noise_of(self.numbers, self.layout.max_length)[1]

    @cached_property
    def nodes(self) -> NodeTable:
        """Return the table of its trees: the layout's own, unless nodes were merged or there are text drafts."""
        # Merged trees have other lists: `is` distinguishes them from drawn ones, even if the parents are equal.
        are_drawn = all(own.parents is drawn.parents for own, drawn in zip(self.trees, self.layout.trees, strict=True))
        return self.layout.nodes if are_drawn else NodeTable.of(self.trees, self.layout)

    @property
    def starts(self) -> Ints:
        """Return the index of each sampling row's root among all nodes, followed by its nodes; and the end."""
        return self.nodes.starts if self.rows_apart is None else np.arange(len(self.trees) + 1) * self.rows_apart


def with_tokens(draft: Draft, tokens: Sequence[int]) -> Draft:
    """Return the draft with tokens in its trees, which are on the host now; tokens: of all nodes, tree by tree."""
    left = iter(tokens)
    trees = tuple(tree._replace(tokens=list(islice(left, tree.num_nodes))) for tree in draft.trees)
    return replace(draft, trees=trees, tokens_M=None)


def trees_of(
    plan: Plan, layout: Layout, tokens_CL: Tensor, most_unmerged: int
) -> tuple[tuple[Tree, ...], Tensor | None]:
    """Return (the tree of every sampling row, the tokens of their nodes if the trees have none).

    most_unmerged: largest pass (roots plus nodes) that is not merged; merging makes the host wait for the device.
    """
    rows, num_nodes = plan.sampling_rows, len(layout.node_M)
    if num_nodes == 0 and not any(row.text_drafts for row in rows):
        return layout.trees, None
    needs_tokens = any(row.text_drafts or row.needs_path for row in rows)
    if needs_tokens or len(rows) + num_nodes > most_unmerged:
        return merge(plan, layout, tokens_CL), None
    return layout.trees, tokens_CL.take(layout.node_M)


def merge(plan: Plan, layout: Layout, tokens_CL: torch.Tensor) -> tuple[Tree, ...]:
    """Return the merged tree of every sampling row; waits for the device, which drafts their tokens."""
    tokens = tokens_CL.tolist() if layout.max_length else [[]] * layout.num_chains
    if layout.shape[1] == 1 and not any(row.text_drafts for row in plan.sampling_rows):
        # With single chains, the tree of the draws already has their nodes.
        return tuple(
            [Tree(chain[: len(tree.parents)], *tree[1:]) for chain, tree in zip(tokens, layout.trees, strict=True)]
        )
    chains: list[list[list[int]]] = [[] for _ in plan.sampling_rows]
    for chain, request, length in zip(tokens, layout.request_C.tolist(), layout.length_C.tolist(), strict=True):
        chains[request].append(chain[:length])
    for of_row, row in zip(chains, plan.sampling_rows, strict=True):
        of_row += [list(one.tokens) for one in row.text_drafts]
    return tuple(merge_chains(of_row) for of_row in chains)
