"""Numbers of a recorded step, made on the host: operands of its passes and draws, in one array.

The slot and position of a node, and what it sees, follow from what a request drafts and from a few of its numbers. What
follows from the shapes of the drafts alone is made once (`_Tables`). The rest takes a few operations for all requests
together.

A request may draft less than the step has room for. Its rows come first, in the places that eager steps give them. The
rows after them see nothing. Their results are not read, and they write K/V to a spare block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.attention.inputs import place, slots_of, words_of
from engine.drafting.draft import Layout
from engine.drafting.model import level_nodes
from engine.drafting.numbers import SCORE_PART, draw_numbers
from engine.kernels.transfer import Field, views
from engine.plan import Row
from engine.sampling.distribution import FILTERS
from engine.speculation.topology import drawn_tree

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

NUM_TEXT = 2
"""Tokens of the text whose draft K/V may be missing: the last accepted one, which the draft model never read, and the
one that the rule added."""


class Distributions(NamedTuple):
    """Operations that make the distributions of a step."""

    any_greedy: bool
    """Whether any request takes the most likely token."""
    filters: tuple[str, ...]
    """Filters that change the distribution of any request."""

    def can_make(self, other: Distributions) -> bool:
        """Whether this makes the others, too: a filter changes nothing of a request that does not ask for it."""
        return self.any_greedy >= other.any_greedy and set(self.filters) >= set(other.filters)


DISTRIBUTIONS = (Distributions(False, ()), Distributions(True, tuple(FILTERS)))
"""Steps are recorded for each of these: softmax alone, and any distribution."""
PAGES, DRAFT_PAGES = "pages", "draft pages"
"""Fields of the block tables."""
MOST_NODES = 64
"""Most nodes of a request: a row's word has a bit for each."""


class StepShape(NamedTuple):
    """Room of a recorded step."""

    sequences: int
    num_drafts: int
    """Independent chains of each request; 0 in plain decoding."""
    draft_length: int
    distributions: Distributions
    drafts_apart: bool = False
    """Whether the chains are drawn outside the recorded work (`apart.py`)."""

    @property
    def fanout(self) -> tuple[int, ...]:
        """Return the children of every node by depth."""
        return (self.num_drafts, *(1,) * (self.draft_length - 1)) if self.num_drafts else ()

    @property
    def num_nodes(self) -> int:
        """Return the number of drafted tokens of each request."""
        return self.num_drafts * self.draft_length

    @property
    def num_rows(self) -> int:
        """Rows of the target's pass."""
        return self.sequences * (1 + self.num_nodes)

    @property
    def num_probs(self) -> int:
        """Number of draft distributions: one below every root and node from which something is drawn."""
        return self.sequences * (1 + self.num_drafts * (self.draft_length - 1)) if self.num_drafts else 0

    @property
    def has_draft_passes(self) -> bool:
        """Whether the draft model's passes are part of the step."""
        return self.num_drafts > 0 and not self.drafts_apart

    def has_room(self, other: StepShape) -> bool:
        """Whether a step of the other shape can run as one of this shape."""
        if self.drafts_apart and bool(self.num_drafts) != bool(other.num_drafts):
            return False
        is_enough = self.sequences >= other.sequences and self.draft_length >= other.draft_length
        return is_enough and self.num_drafts >= other.num_drafts and self.distributions.can_make(other.distributions)


class PassSize(NamedTuple):
    """Size of a pass, in which all sequences have the same number of rows."""

    queries: int
    """Rows of each sequence."""
    is_text: bool
    """Whether they are the last tokens of the text, whose K/V is missing."""


def passes_of(shape: StepShape) -> list[PassSize]:
    """Return the draft model's pass over the text, those over its nodes level by level, and the target's."""
    drafting = [PassSize(NUM_TEXT, True), *[PassSize(shape.num_drafts, False)] * (shape.draft_length - 1)]
    return [*(drafting if shape.has_draft_passes else ()), PassSize(1 + shape.num_nodes, False)]


class _Rows(NamedTuple):
    """Rows of a request in one pass."""

    is_used_Q: Bools
    """Whether the request uses the row; the others are padding."""
    offset_Q: Ints
    """Offset of the row's token from the end of the text; the root has -1."""
    depth_Q: Ints
    """Depth of the row's node; 0 for the root."""
    word_Q: Ints
    """Nodes of the request that the row sees: a bit for each."""
    num_seen: int
    """Number of nodes in the cache when the pass attends."""


def _rows(queries: int, offsets: Ints, depths: Ints, seen_QN: Bools) -> _Rows:
    """Return rows of a pass: those in use, and unused ones after them, up to `queries`."""
    rest = (0, queries - len(offsets))
    words = words_of([seen_QN], [0], queries)[:, 0]
    return _Rows(
        np.arange(queries) < len(offsets), np.pad(offsets, rest), np.pad(depths, rest), words, seen_QN.shape[1]
    )


def _rows_of_passes(shape: StepShape, fanout: tuple[int, ...]) -> Iterator[_Rows]:
    """Yield the rows of a request that drafts `fanout`, pass by pass."""
    for number, (queries, is_text) in enumerate(passes_of(shape)[:-1]):
        if is_text:
            text = np.arange(NUM_TEXT)
            yield _rows(queries, text, 0 * text, np.zeros((NUM_TEXT, 0), dtype=np.bool_))
        elif number >= len(fanout):
            nothing = np.zeros(0, dtype=np.int64)
            yield _rows(queries, nothing, nothing, np.zeros((0, 0), dtype=np.bool_))
        else:
            nodes = level_nodes(fanout[:number])
            offsets = len(nodes.cached_depths) + np.arange(len(nodes.depths))
            yield _rows(queries, offsets, np.array(nodes.depths), nodes.ancestry)
    tree = drawn_tree(fanout)
    seen_QN = np.concatenate([np.zeros((1, tree.num_nodes), dtype=np.bool_), tree.ancestry()])
    yield _rows(1 + shape.num_nodes, np.arange(-1, tree.num_nodes), np.array([0, *tree.depths]), seen_QN)


class _Tables(NamedTuple):
    """Arrays that follow from the draft shapes of all requests of a step; each [S, ...]."""

    is_used: Bools
    offsets: Ints
    depths: Ints
    words: Ints
    """[S, rows of all passes] See `_Rows`."""
    num_seen: Ints
    """[S, passes] Nodes in the cache."""
    node_depths: Ints
    """[S, 2, nodes] Depths of the draft model's nodes, and of the target's."""
    tokens: Ints
    """[S, M] Index of each drafted token of the target's pass among the tokens of all chains."""
    nodes: Ints
    """[S, K, L + 1] Row of the target's pass below the first i tokens of each chain; the root after a chain's end."""
    lengths: Ints
    """[S, K] Number of tokens of each chain."""
    is_dead: Bools
    """[S, K] Chains that must not win. A request without drafts has chain 0, with length 0."""


@lru_cache(maxsize=1024)
def _table_of(shape: StepShape, fanout: tuple[int, ...]) -> _Tables:
    """Return the tables of one request, without the axis of requests."""
    used, offsets, depths, words, num_seen = zip(*_rows_of_passes(shape, fanout), strict=True)
    tree, num_drafts, length = drawn_tree(fanout), fanout[0] if fanout else 0, len(fanout)
    node_depths = np.zeros((2, MOST_NODES), dtype=np.int64)
    node_depths[0, : tree.num_nodes] = np.repeat(np.arange(1, length + 1), num_drafts)
    node_depths[1, : tree.num_nodes] = tree.depths
    tokens = np.zeros(shape.num_nodes, dtype=np.int64)
    chain_KL = np.arange(num_drafts)[:, None] * shape.draft_length + np.arange(length)
    tokens[: tree.num_nodes] = chain_KL.ravel()
    nodes = np.zeros((max(1, shape.num_drafts), shape.draft_length + 1), dtype=np.int64)
    nodes[: len(tree.paths), : length + 1] = tree.paths
    chain_K = np.arange(len(nodes))
    return _Tables(
        is_used=np.concatenate(used),
        offsets=np.concatenate(offsets),
        depths=np.concatenate(depths),
        words=np.concatenate(words),
        num_seen=np.array(num_seen),
        node_depths=node_depths,
        tokens=tokens,
        nodes=nodes,
        lengths=np.where(chain_K < num_drafts, length, 0),
        is_dead=chain_K >= max(1, num_drafts),
    )


@lru_cache(maxsize=256)
def tables_of(shape: StepShape, fanouts: tuple[tuple[int, ...], ...]) -> _Tables:
    """Return the tables of requests that draft these shapes; padding drafts nothing."""
    padded = [*fanouts, *[()] * (shape.sequences - len(fanouts))]
    return _Tables(*map(np.stack, zip(*(_table_of(shape, fanout) for fanout in padded), strict=True)))


class StepInputs:
    """Prepares the numbers of steps of one shape."""

    def __init__(
        self, shape: StepShape, layout: Layout, block_size: int, most_pages: int, spare_blocks: Mapping[str, int]
    ) -> None:
        """layout: of the chains that all S requests draft; most_pages: of the longest text with its drafts;
        spare_blocks: to which padding writes its K/V, by table: `PAGES`, and `DRAFT_PAGES` if the draft model has one.
        """
        self.shape, self._layout = shape, layout
        self.passes = passes_of(shape)
        of_target = sum(one.queries for one in self.passes[:-1])
        self._parts = {PAGES: slice(None)}
        """Rows of the passes that use each table."""
        if DRAFT_PAGES in spare_blocks and shape.has_draft_passes:
            self._parts = {DRAFT_PAGES: slice(of_target), PAGES: slice(of_target, None)}
        self.draft_pages = next(iter(self._parts))
        """Table that the draft model's passes use."""
        self._block_size, self._spare_blocks = block_size, {name: spare_blocks[name] for name in self._parts}
        self.fields = _fields(shape, self.passes, layout, most_pages, self._parts)
        self._flat = np.zeros(sum(field.words for field in self.fields), dtype=np.int64)
        self._views = views(self._flat, self.fields)
        self._written: dict[str, list[tuple[int, ...]]] = {}
        """Blocks of each request that the tables have."""
        for name, spare_block in self._spare_blocks.items():
            self._views[name][:] = spare_block
            self._written[name] = [()] * shape.sequences

    def of(self, rows: Sequence[Row]) -> Array:
        """Return the numbers of a step [words], valid until the next call."""
        v, count = self._views, self.shape.sequences
        count_S, first_S = (np.zeros(count, dtype=np.int64) for _ in range(2))
        end_S = np.ones(count, dtype=np.int64)
        end_S[: len(rows)] = [row.end for row in rows]
        v["root"][: len(rows)] = [row.input_ids[0] for row in rows]
        self._write_pages(PAGES, [row.block_ids for row in rows])
        if self.shape.has_draft_passes:
            for number, row in enumerate(rows):
                if row.draft_input_ids:
                    count_S[number], first_S[number] = len(row.draft_input_ids), row.first_draft_key
                    v["text"][number, : len(row.draft_input_ids)] = row.draft_input_ids
        if self.draft_pages != PAGES:
            self._write_pages(self.draft_pages, [row.draft_table if row.draft_input_ids else () for row in rows])
        tables = tables_of(self.shape, tuple([row.fanout for row in rows]))
        self._fill_passes(tables, count_S, end_S)
        v["ends"][:], v["first keys"][:] = end_S, first_S
        v["node positions"][:] = (end_S - 1)[:, None] + tables.node_depths.swapaxes(0, 1)
        if self.shape.has_draft_passes:
            v["wanted"][:] = np.arange(count) * NUM_TEXT + count_S.clip(min=1) - 1
        self._fill_chains(tables)
        self._fill_distributions(rows, end_S, tables.is_dead.ravel())
        return self._flat

    def _write_pages(self, name: str, tables: Sequence[tuple[int, ...]]) -> None:
        """Write the block tables that are not those of the last step; padding has spare blocks.

        A sequence's table is a tuple, and another one if it changes, so most are recognised without being read.
        """
        pages, written, spare_block = self._views[name], self._written[name], self._spare_blocks[name]
        for number, table in enumerate([*tables, *[()] * (len(written) - len(tables))]):
            if written[number] is not table:
                pages[number, : len(table)] = table
                pages[number, len(table) : len(written[number])] = spare_block
                written[number] = table

    def _fill_passes(self, tables: _Tables, count_S: Ints, end_S: Ints) -> None:
        """Fill positions, slots and what is seen, for all rows of all passes."""
        v, size = self._views, self._block_size
        text, is_used, offsets, depths = slice(0, NUM_TEXT), tables.is_used, tables.offsets, tables.depths
        if self.shape.has_draft_passes:
            is_used, offsets, depths = is_used.copy(), offsets.copy(), depths.copy()
            is_used[:, text] = tables.offsets[:, text] < count_S[:, None]
            offsets[:, text] -= count_S[:, None]
            depths[:, text] = offsets[:, text] + 1
        places = place(end_S[:, None], np.where(is_used, offsets, -1), np.where(is_used, depths, 0))
        positions, limits, row_S1 = places.positions, places.limits, np.arange(len(end_S))[:, None]
        if self.shape.has_draft_passes:
            limits[:, text] *= is_used[:, text]
        slots = np.empty_like(positions)
        for name, part in self._parts.items():
            own = slots_of(v[name], row_S1, places.indices[:, part], size)
            slots[:, part] = np.where(is_used[:, part], own, self._spare_blocks[name] * size)
        start = 0
        for number, one in enumerate(self.passes):
            part = slice(start, start + one.queries)
            start = part.stop
            for name, values in (("slots", slots), ("limits", limits), ("words", tables.words)):
                v[f"{name} {number}"][:] = values[:, part]
            v[f"counts {number}"][:] = is_used[:, part].sum(1)
            v[f"positions {number}"][:] = v[f"short positions {number}"][:] = positions[:, part]
            v[f"num keys {number}"][:] = end_S + tables.num_seen[:, number]

    def _fill_chains(self, tables: _Tables) -> None:
        """Fill chain lengths, and the row of each node in the target's pass."""
        v, shape = self._views, self.shape
        sequence_S1 = np.arange(shape.sequences)[:, None]
        v["lengths"][:] = tables.lengths
        v["nodes"][:] = tables.nodes + (1 + shape.num_nodes) * sequence_S1[:, :, None]
        if shape.num_drafts:
            v["tokens"][:] = tables.tokens + shape.num_nodes * sequence_S1

    def _fill_distributions(self, rows: Sequence[Row], end_S: Ints, is_dead_C: Bools) -> None:
        """Fill the operands of distributions and draws; padding gets neutral values."""
        v, layout = self._views, self._layout
        v["temperature"][:] = 1.0
        v["temperature"][: len(rows)] = [0.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
        for name in self.shape.distributions.filters:
            v[name][:] = FILTERS[name]
            v[name][: len(rows)] = [getattr(row.sampling, name) for row in rows]
        seed_S = np.zeros(self.shape.sequences, dtype=np.int64)
        seed_S[: len(rows)] = [row.sampling.seed for row in rows]
        chain_C = layout.request_C
        v["noise"][:] = draw_numbers(seed_S[chain_C], end_S[chain_C], layout.rank_C, layout.max_length)
        v["noise"][SCORE_PART, is_dead_C] = -np.inf  # their scores become the largest: they win no race


def _fields(
    shape: StepShape, passes: Sequence[PassSize], layout: Layout, most_pages: int, tables: Iterable[str]
) -> list[Field]:
    count, num_chains = shape.sequences, layout.num_chains
    fields = [
        *(Field(name, np.int32, (count, most_pages)) for name in tables),
        Field("ends", np.int32, (count,)),
        Field("first keys", np.int32, (count,)),
        Field("node positions", np.int32, (2, count, MOST_NODES)),
        Field("root", np.int64, (count,)),
        Field("lengths", np.int64, (count, num_chains // count)),
        Field("nodes", np.int64, (count, num_chains // count, 1 + shape.draft_length)),
        Field("noise", np.float64, (6, num_chains, max(1, layout.max_length))),
        Field("temperature", np.float32, (count,)),
        *(Field(name, np.int64 if name == "top_k" else np.float32, (count,)) for name in shape.distributions.filters),
    ]
    if shape.num_drafts:
        fields.append(Field("tokens", np.int64, (count, shape.num_nodes)))
    if shape.has_draft_passes:
        fields += [Field("text", np.int64, (count, NUM_TEXT)), Field("wanted", np.int64, (count,))]
    for number, one in enumerate(passes):
        of_rows = (count, one.queries)
        fields += [
            Field(f"positions {number}", np.int64, of_rows),
            Field(f"short positions {number}", np.int32, of_rows),
            Field(f"slots {number}", np.int64, of_rows),
            Field(f"limits {number}", np.int32, of_rows),
            Field(f"words {number}", np.int64, of_rows),
            Field(f"num keys {number}", np.int32, (count,)),
            Field(f"counts {number}", np.int32, (count,)),
        ]
    return fields
