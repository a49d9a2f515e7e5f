"""Numbers of a recorded step, made on the host: operands of its passes and draws, in one array.

The slot and position of a node, and what it sees, follow from what a request drafts and from a few of its numbers. What
follows from the shapes of the drafts alone is made once (`_Tables`). The rest takes a few operations for all requests
together.

A request may draft less than the step has room for. Its rows come first, in the places that eager steps give them. The
rows after them see nothing. Their results are not read, and they write K/V to a spare block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.attention.inputs import NO_NODES, NodeInput, place, slots_of, words_of
from engine.drafting.draft import Layout
from engine.drafting.drafter import RecordedDrafter
from engine.drafting.numbers import SCORE_PART, draw_numbers
from engine.fanout import Fanout
from engine.kernels.torch_kernels import TORCH, Kernels
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
        """Whether a step with these distributions serves requests of the other: a filter changes nothing of a request
        that does not ask for it.
        """
        return self.any_greedy >= other.any_greedy and set(self.filters) >= set(other.filters)


DISTRIBUTIONS = (Distributions(False, ()), Distributions(True, tuple(FILTERS)))
"""Distributions for which steps are recorded: softmax alone, and any."""
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

    @property
    def fanout(self) -> Fanout:
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

    def has_room(self, other: StepShape) -> bool:
        """Whether a step of the other shape can run as one of this shape."""
        is_enough = self.sequences >= other.sequences and self.draft_length >= other.draft_length
        return is_enough and self.num_drafts >= other.num_drafts and self.distributions.can_make(other.distributions)


PassNodes = Callable[[Fanout, int], Sequence[NodeInput]]


class DraftPasses(NamedTuple):
    """Passes of the drafting in steps of a shape."""

    nodes_of: PassNodes = lambda *_: ()
    """`RecordedDrafter.pass_nodes`."""
    num_text: int = 0
    """Rows of the first pass for the last tokens of each text, whose draft K/V is missing; its nodes follow them."""

    def sizes(self, shape: StepShape) -> tuple[int, ...]:
        """Return the rows of each sequence in the passes of drafting, and in the target's."""
        nodes = [len(one.depths) for one in self.nodes_of(shape.fanout, 0)]
        return *(count + self.num_text * (not number) for number, count in enumerate(nodes)), 1 + shape.num_nodes


_Rows = tuple[Bools, Ints, Ints, Ints, int]
"""Rows of a request in one pass: the first five arrays of `_Tables`, without the axis of requests."""


def _rows(queries: int, num_text: int, nodes: NodeInput) -> _Rows:
    """Return rows of a pass: of the text's last tokens, of nodes, and unused ones after them, up to `queries`."""
    text, num_seen = np.arange(-num_text, 0), nodes.ancestry.shape[1]
    offsets = np.concatenate([text, len(nodes.cached_depths) + np.arange(len(nodes.depths))])
    depths = np.concatenate([text + 1, np.array(nodes.depths, dtype=np.int64)])
    rest = (0, queries - len(offsets))
    words = words_of([nodes.ancestry], [num_text], queries)[:, 0]
    return np.arange(queries) < len(offsets), np.pad(offsets, rest), np.pad(depths, rest), words, num_seen


def _rows_of_passes(shape: StepShape, passes: DraftPasses, fanout: Fanout) -> Iterator[_Rows]:
    """Yield the rows of a request that drafts `fanout`, pass by pass."""
    sizes, own = passes.sizes(shape), passes.nodes_of(fanout, 0)
    for number, queries in enumerate(sizes[:-1]):
        yield _rows(queries, passes.num_text if number == 0 else 0, own[number] if number < len(own) else NO_NODES)
    tree = drawn_tree(fanout)
    yield _rows(sizes[-1], 1, NodeInput((), tree.depths, (), tree.ancestry()))


class _Tables(NamedTuple):
    """Arrays that follow from the draft shapes of all requests of a step; each [S, ...]."""

    is_used: Bools
    """[S, rows of all passes] Whether the request uses the row; other rows are padding."""
    offsets: Ints
    """[S, rows of all passes] Offset of the row's token from the end of the text; the root has -1."""
    depths: Ints
    """[S, rows of all passes] Depth of the row's node; 0 for the root."""
    words: Ints
    """[S, rows of all passes] Nodes of the request that the row sees: a bit for each."""
    num_seen: Ints
    """[S, passes] Number of nodes in the cache when the pass attends."""
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
def _table_of(shape: StepShape, passes: DraftPasses, fanout: Fanout) -> _Tables:
    """Return the tables of one request, without the axis of requests."""
    used, offsets, depths, words, num_seen = zip(*_rows_of_passes(shape, passes, fanout), strict=True)
    tree, num_drafts, length = drawn_tree(fanout), fanout[0] if fanout else 0, len(fanout)
    drafted = max(((*one.cached_depths, *one.depths) for one in passes.nodes_of(fanout, 0)), key=len, default=())
    node_depths = np.zeros((2, MOST_NODES), dtype=np.int64)
    node_depths[0, : len(drafted)] = drafted
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
def tables_of(shape: StepShape, passes: DraftPasses, fanouts: tuple[Fanout, ...]) -> _Tables:
    """Return the tables of requests that draft these shapes; padding drafts nothing."""
    padded = [*fanouts, *[()] * (shape.sequences - len(fanouts))]
    return _Tables(*map(np.stack, zip(*(_table_of(shape, passes, fanout) for fanout in padded), strict=True)))


class StepInputs:
    """Prepares the numbers of steps of one shape."""

    def __init__(
        self,
        shape: StepShape,
        layout: Layout,
        block_size: int,
        most_pages: int,
        spare_blocks: Mapping[str, int],
        drafter: RecordedDrafter | None = None,
        is_head: bool = False,
        kernels: Kernels = TORCH,
    ) -> None:
        """layout: of the chains that all S requests draft; most_pages: of the longest text with its drafts;
        spare_blocks: to which padding writes its K/V, by table: `PAGES`, and `DRAFT_PAGES` if the draft model has one.
        """
        self.shape = shape
        self._layout = layout
        self._kernels = kernels
        self._drafter = drafter if shape.num_drafts else None
        self._first_key = int(is_head)
        """Index of the first token with draft K/V: for a head, a text's first token has no state before it."""
        self.draft_passes, self._num_readable = DraftPasses(), 0
        if self._drafter is not None and self._drafter.runner is not None:
            num_text = shape.draft_length + 1 if is_head else NUM_TEXT
            self.draft_passes = DraftPasses(self._drafter.pass_nodes, num_text)
            self._num_readable = self._drafter.runner.num_embeddings
        self.sizes = self.draft_passes.sizes(shape)
        """Rows of each sequence in every pass; the last is the target's."""
        self._parts = {PAGES: slice(None)}
        """Rows of the passes that use each table."""
        if DRAFT_PAGES in spare_blocks and self._drafter is not None:
            num_draft_rows = sum(self.sizes[:-1])
            self._parts = {DRAFT_PAGES: slice(num_draft_rows), PAGES: slice(num_draft_rows, None)}
        self.draft_pages = next(iter(self._parts))
        """Table that the draft model's passes use."""
        self._block_size, self._spare_blocks = block_size, {name: spare_blocks[name] for name in self._parts}
        nodes = self.draft_passes.nodes_of(shape.fanout, 0)
        self.fields = _fields(shape, self.sizes, nodes, layout, most_pages, self._parts, is_head)
        self._flat = np.zeros(sum(field.words for field in self.fields), dtype=np.int64)
        self._views = views(self._flat, self.fields)
        self._written: dict[str, list[tuple[int, ...]]] = {}
        """Blocks of each request that the tables have."""
        for name, spare_block in self._spare_blocks.items():
            self._views[name][:] = spare_block
            self._written[name] = [()] * shape.sequences
        self._mask = nodes[0].tokens[0] if nodes and nodes[0].tokens else 0
        if "block" in self._views:
            self._views["block"][:] = nodes[-1].tokens

    def of(self, rows: Sequence[Row]) -> Array:
        """Return the numbers of a step [words], valid until the next call."""
        v, count = self._views, self.shape.sequences
        count_S, first_S = (np.zeros(count, dtype=np.int64) for _ in range(2))
        end_S = np.ones(count, dtype=np.int64)
        end_S[: len(rows)] = [row.end for row in rows]
        v["root"][: len(rows)] = [row.input_ids[0] for row in rows]
        drafter, blocks = self._drafter, [row.block_ids for row in rows]
        if self.draft_pages != PAGES:
            self._write_pages(self.draft_pages, [row.draft_table if row.draft_input_ids else () for row in rows])
        elif drafter is not None:
            blocks = [drafter.table_of(row, number) for number, row in enumerate(rows)]
        self._write_pages(PAGES, blocks)
        if drafter is not None:
            self._fill_text(rows, count_S, first_S)
        tables = tables_of(self.shape, self.draft_passes, tuple([row.fanout for row in rows]))
        self._fill_passes(tables, count_S, end_S)
        v["ends"][:], v["first keys"][:] = end_S, first_S
        v["node positions"][:] = (end_S - 1)[:, None] + tables.node_depths.swapaxes(0, 1)
        self._fill_chains(tables)
        self._fill_distributions(rows, end_S, tables.is_dead.ravel())
        return self._flat

    def _fill_text(self, rows: Sequence[Row], count_S: Ints, first_S: Ints) -> None:
        """Fill the tokens that the first passes of drafting read. count_S, first_S: output, their number and the first
        visible one.
        """
        v, least = self._views, self._first_key
        v["text"][:] = self._mask
        for number, row in enumerate(rows):
            if row.draft_input_ids and (row.fanout or not least):
                text = row.draft_input_ids[-min(self.draft_passes.num_text, row.end - least) :]
                count_S[number], first_S[number] = len(text), max(least, row.first_draft_key)
                v["text"][number, : len(text)] = text
        last_S = np.arange(len(count_S)) * self.sizes[0] + count_S.clip(min=1) - 1
        v["wanted"][:] = last_S[:, None] + np.arange(v["wanted"].shape[1])
        if "block" in v:
            v["block"][:, 0] = v["root"]
        for name in v.keys() & {"text", "block"}:
            np.putmask(v[name], v[name] >= self._num_readable, 0)

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
        v, size, row_S1 = self._views, self._block_size, np.arange(len(end_S))[:, None]
        is_used, offsets, depths, words = tables.is_used, tables.offsets, tables.depths, tables.words
        first = self.sizes[0] if self._drafter is not None else 0
        if first:
            # A request that misses less of its text has its rows further to the left.
            index_SQ = np.arange(first) + (self.draft_passes.num_text - count_S)[:, None]
            moved = row_S1, np.minimum(index_SQ, first - 1)
            is_used, offsets, depths, words = (
                np.concatenate([one[moved], one[:, first:]], 1) for one in (is_used, offsets, depths, words)
            )
            is_used[:, :first] &= index_SQ < first
            words[:, :first] *= is_used[:, :first]
        places = place(end_S[:, None], np.where(is_used, offsets, -1), np.where(is_used, depths, 0))
        positions, limits = places.positions, places.limits
        limits[:, :first] *= is_used[:, :first]
        slots = np.empty_like(positions)
        for name, part in self._parts.items():
            own = slots_of(v[name], row_S1, places.indices[:, part], size)
            slots[:, part] = np.where(is_used[:, part], own, self._spare_blocks[name] * size)
        if "before" in v:
            is_text = (is_used & (offsets < 0))[:, :first]
            before = np.where(is_text, places.indices[:, :first] - 1, 0)
            v["before"][:] = np.where(is_text, slots_of(v[PAGES], row_S1, before, size), -1)
        start = 0
        for number, queries in enumerate(self.sizes):
            part = slice(start, start + queries)
            start = part.stop
            for name, values in (("slots", slots), ("limits", limits), ("words", words)):
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
        v["noise"][:] = draw_numbers(self._kernels, seed_S[chain_C], end_S[chain_C], layout.rank_C, layout.max_length)
        v["noise"][SCORE_PART, is_dead_C] = -np.inf  # their scores become the largest: they win no race


def _fields(
    shape: StepShape,
    sizes: Sequence[int],
    drafted: Sequence[NodeInput],
    layout: Layout,
    most_pages: int,
    tables: Iterable[str],
    is_head: bool,
) -> list[Field]:
    """Return the arrays of a step. drafted: nodes in the passes of drafting."""
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
    if drafted:
        fields.append(Field("text", np.int64, (count, sizes[0])))
        fields.append(Field("wanted", np.int64, (count, 1 + len(drafted[0].depths))))
        if is_head:
            fields.append(Field("before", np.int64, (count, sizes[0])))
        if drafted[-1].tokens and len(drafted) > 1:
            fields.append(Field("block", np.int64, (count, sizes[1])))
    for number, queries in enumerate(sizes):
        of_rows = (count, queries)
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
