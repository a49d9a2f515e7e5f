"""Numbers of a recorded step, made on the host: operands of its passes and draws, in one array.

The slot, position and visible keys of a node follow from the shape of a request's drafts and from a
few numbers of the request. Arrays that follow from the shapes of drafts alone are made once
(`_Tables`). The other arrays take a few operations for all requests together.

A request may draft less than the step has room for. Its rows come first, in the order of eager
steps. The rows after them are padding: they see nothing, their results are not read, and they write
K/V to a spare block.
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
"""Last tokens that may lack draft K/V: the last accepted one, and the rule's next one."""


class Distributions(NamedTuple):
    """Operations that make the distributions of a step."""

    any_greedy: bool
    """Whether a request takes the most likely token."""
    filters: tuple[str, ...]
    """Filters that change a request's distribution."""

    def can_make(self, other: Distributions) -> bool:
        """Whether a step with these distributions serves requests that need the other ones.

        A filter does not change the distribution of a request that does not ask for the filter.
        """
        return self.any_greedy >= other.any_greedy and set(self.filters) >= set(other.filters)


DISTRIBUTIONS = (Distributions(False, ()), Distributions(True, tuple(FILTERS)))
"""Distributions of recorded steps: softmax alone, and all operations."""
PAGES, DRAFT_PAGES = "pages", "draft pages"
MOST_NODES = 64
"""Most nodes of a request: a word has a bit for each."""


class StepShape(NamedTuple):
    """Room of a recorded step."""

    sequences: int
    num_drafts: int
    """Independent chains of a request; 0 in plain decoding."""
    draft_length: int
    distributions: Distributions

    @property
    def fanout(self) -> Fanout:
        if not self.num_drafts:
            return ()
        return (self.num_drafts, *(1,) * (self.draft_length - 1))

    @property
    def num_nodes(self) -> int:
        return self.num_drafts * self.draft_length

    @property
    def num_rows(self) -> int:
        return self.sequences * (1 + self.num_nodes)

    @property
    def num_probs(self) -> int:
        """Return the number of draft distributions: one for each root and node with children."""
        if not self.num_drafts:
            return 0
        return self.sequences * (1 + self.num_drafts * (self.draft_length - 1))

    def has_room(self, other: StepShape) -> bool:
        """Whether a step of the other shape can run as one of this shape."""
        return (
            self.sequences >= other.sequences
            and self.draft_length >= other.draft_length
            and self.num_drafts >= other.num_drafts
            and self.distributions.can_make(other.distributions)
        )


PassNodes = Callable[[Fanout, int], Sequence[NodeInput]]


class DraftPasses(NamedTuple):
    """Passes of the drafting in steps of a shape."""

    nodes_of: PassNodes = lambda *_: ()
    num_text: int = 0
    """Rows of the first pass for each text's last tokens without draft K/V."""

    def sizes(self, shape: StepShape) -> tuple[int, ...]:
        """Return the rows of each sequence in the passes of drafting, and in the target's."""
        counts = [len(nodes.depths) for nodes in self.nodes_of(shape.fanout, 0)]
        if counts:
            counts[0] += self.num_text
        return *counts, 1 + shape.num_nodes


_Rows = tuple[Bools, Ints, Ints, Ints, int]
"""First five arrays of `_Tables` in one pass, without the axis of requests."""


def _rows(queries: int, num_text: int, nodes: NodeInput) -> _Rows:
    """Return rows of a pass: the text's last tokens, nodes, and padding up to `queries`."""
    text = np.arange(-num_text, 0)
    offsets = np.concatenate([text, len(nodes.cached_depths) + np.arange(len(nodes.depths))])
    depths = np.concatenate([text + 1, np.array(nodes.depths, dtype=np.int64)])
    is_used = np.arange(queries) < len(offsets)
    rest = (0, queries - len(offsets))
    words = words_of([nodes.ancestry], [num_text], queries)[:, 0]
    num_seen = nodes.ancestry.shape[1]
    return is_used, np.pad(offsets, rest), np.pad(depths, rest), words, num_seen


def _rows_of_passes(shape: StepShape, passes: DraftPasses, fanout: Fanout) -> Iterator[_Rows]:
    """Yield the rows of a request that drafts `fanout`, pass by pass."""
    *draft_sizes, target_size = passes.sizes(shape)
    draft_nodes = passes.nodes_of(fanout, 0)
    num_text = passes.num_text
    for number, queries in enumerate(draft_sizes):
        nodes = draft_nodes[number] if number < len(draft_nodes) else NO_NODES
        yield _rows(queries, num_text, nodes)
        num_text = 0  # only the first pass reads text
    tree = drawn_tree(fanout)
    yield _rows(target_size, 1, NodeInput((), tree.depths, (), tree.ancestry()))


class _Tables(NamedTuple):
    """Arrays that follow from the draft shapes of all requests of a step; each [S, ...]."""

    is_used: Bools
    """[S, rows of all passes] False for padding."""
    offsets: Ints
    """[S, rows of all passes] Offset of the row's token from the text's end; the root has -1."""
    depths: Ints
    """[S, rows of all passes] Depth of the row's node; 0 for the root."""
    words: Ints
    """[S, rows of all passes] Bits of the nodes that the row sees."""
    num_seen: Ints
    """[S, passes] Nodes in the cache when the pass attends."""
    node_depths: Ints
    """[S, 2, nodes] Depths of the draft model's nodes, and of the target's."""
    tokens: Ints
    """[S, M] Index of each drafted token of the target's pass in the chains' tokens."""
    nodes: Ints
    """[S, K, L + 1] Target row after i tokens of each chain; the root after its end."""
    lengths: Ints
    is_dead: Bools
    """[S, K] Chains that must not win; without drafts chain 0 lives, with length 0."""


@lru_cache(maxsize=1024)
def _table_of(shape: StepShape, passes: DraftPasses, fanout: Fanout) -> _Tables:
    """Return the tables of one request, without the axis of requests."""
    rows = zip(*_rows_of_passes(shape, passes, fanout), strict=True)
    used, offsets, depths, words, num_seen = rows
    tree = drawn_tree(fanout)
    num_drafts = fanout[0] if fanout else 0
    length = len(fanout)
    depths_by_pass = [(*nodes.cached_depths, *nodes.depths) for nodes in passes.nodes_of(fanout, 0)]
    drafted = max(depths_by_pass, key=len, default=())
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
    tables = [_table_of(shape, passes, fanout) for fanout in padded]
    return _Tables(*map(np.stack, zip(*tables, strict=True)))


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
        """Allocate the arrays.

        layout: of the chains that all S requests draft; most_pages: of the longest text with its
        drafts; spare_blocks: block for the K/V of padding, by table: `PAGES`, and `DRAFT_PAGES` if
        the draft model has a table.
        """
        self.shape = shape
        self._layout = layout
        self._kernels = kernels
        self._drafter = drafter if shape.num_drafts else None
        self._first_key = int(is_head)
        """First token with draft K/V; a head reads no state before the first token."""
        self.draft_passes = DraftPasses()
        self._num_readable = 0
        if self._drafter is not None and self._drafter.runner is not None:
            num_text = shape.draft_length + 1 if is_head else NUM_TEXT
            self.draft_passes = DraftPasses(self._drafter.pass_nodes, num_text)
            self._num_readable = self._drafter.runner.num_embeddings
        self.sizes = self.draft_passes.sizes(shape)
        """Rows of each sequence in every pass; the last pass is the target's."""
        self._parts = {PAGES: slice(None)}
        """Rows of the passes that use each table."""
        if DRAFT_PAGES in spare_blocks and self._drafter is not None:
            num_draft_rows = sum(self.sizes[:-1])
            self._parts = {DRAFT_PAGES: slice(num_draft_rows), PAGES: slice(num_draft_rows, None)}
        self.draft_pages = next(iter(self._parts))
        """Table of the draft model's passes."""
        self._block_size = block_size
        self._spare_blocks = {name: spare_blocks[name] for name in self._parts}
        nodes = self.draft_passes.nodes_of(shape.fanout, 0)
        self.fields = _fields(shape, self.sizes, nodes, layout, most_pages, self._parts, is_head)
        self._flat = np.zeros(sum(field.words for field in self.fields), dtype=np.int64)
        self._views = views(self._flat, self.fields)
        self._written: dict[str, list[tuple[int, ...]]] = {}
        for name, spare_block in self._spare_blocks.items():
            self._views[name][:] = spare_block
            self._written[name] = [()] * shape.sequences
        self._mask = nodes[0].tokens[0] if nodes and nodes[0].tokens else 0
        if "block" in self._views:
            self._views["block"][:] = nodes[-1].tokens

    def of(self, rows: Sequence[Row]) -> Array:
        """Return the numbers of a step [words], valid until the next call."""
        v = self._views
        count = self.shape.sequences
        count_S = np.zeros(count, dtype=np.int64)
        first_S = np.zeros(count, dtype=np.int64)
        end_S = np.ones(count, dtype=np.int64)
        end_S[: len(rows)] = [row.end for row in rows]
        v["root"][: len(rows)] = [row.input_ids[0] for row in rows]
        drafter = self._drafter
        blocks = [row.block_ids for row in rows]
        if self.draft_pages != PAGES:
            draft_blocks = [row.draft_table if row.draft_input_ids else () for row in rows]
            self._write_pages(self.draft_pages, draft_blocks)
        elif drafter is not None:
            blocks = [drafter.table_of(row, number) for number, row in enumerate(rows)]
        self._write_pages(PAGES, blocks)
        if drafter is not None:
            self._fill_text(rows, count_S, first_S)
        tables = tables_of(self.shape, self.draft_passes, tuple([row.fanout for row in rows]))
        self._fill_passes(tables, count_S, end_S)
        v["ends"][:] = end_S
        v["first keys"][:] = first_S
        v["node positions"][:] = (end_S - 1)[:, None] + tables.node_depths.swapaxes(0, 1)
        self._fill_chains(tables)
        self._fill_distributions(rows, end_S, tables.is_dead.ravel())
        return self._flat

    def _fill_text(self, rows: Sequence[Row], count_S: Ints, first_S: Ints) -> None:
        """Fill the tokens that the first passes of drafting read.

        count_S, first_S: output, the number of these tokens and the first visible token.
        """
        v = self._views
        least = self._first_key
        v["text"][:] = self._mask
        for number, row in enumerate(rows):
            if row.draft_input_ids and (row.fanout or not least):
                text = row.draft_input_ids[-min(self.draft_passes.num_text, row.end - least) :]
                count_S[number] = len(text)
                first_S[number] = max(least, row.first_draft_key)
                v["text"][number, : len(text)] = text
        last_S = np.arange(len(count_S)) * self.sizes[0] + count_S.clip(min=1) - 1
        v["wanted"][:] = last_S[:, None] + np.arange(v["wanted"].shape[1])
        if "block" in v:
            v["block"][:, 0] = v["root"]
        for name in v.keys() & {"text", "block"}:
            np.putmask(v[name], v[name] >= self._num_readable, 0)

    def _write_pages(self, name: str, tables: Sequence[tuple[int, ...]]) -> None:
        """Write the block tables that changed since the last step; padding has spare blocks.

        A changed table is another tuple, so the same object need not be read again.
        """
        pages = self._views[name]
        written = self._written[name]
        spare_block = self._spare_blocks[name]
        for number, table in enumerate([*tables, *[()] * (len(written) - len(tables))]):
            if written[number] is not table:
                pages[number, : len(table)] = table
                pages[number, len(table) : len(written[number])] = spare_block
                written[number] = table

    def _fill_passes(self, tables: _Tables, count_S: Ints, end_S: Ints) -> None:
        """Fill positions, slots and visible nodes, for all rows of all passes."""
        v = self._views
        row_S1 = np.arange(len(end_S))[:, None]
        rows: tuple[Array, ...] = (tables.is_used, tables.offsets, tables.depths, tables.words)
        first = self.sizes[0] if self._drafter is not None else 0
        if first:
            # A request that misses less of its text has its rows further to the left.
            index_SQ = np.arange(first) + (self.draft_passes.num_text - count_S)[:, None]
            moved = row_S1, np.minimum(index_SQ, first - 1)
            rows = tuple(np.concatenate([array[moved], array[:, first:]], 1) for array in rows)
        is_used, offsets, depths, words = rows
        if first:
            is_used[:, :first] &= index_SQ < first
            words[:, :first] *= is_used[:, :first]
        used_offsets = np.where(is_used, offsets, -1)
        used_depths = np.where(is_used, depths, 0)
        indices, positions, limits = place(end_S[:, None], used_offsets, used_depths)
        limits[:, :first] *= is_used[:, :first]
        slots = np.empty_like(positions)
        for name, part in self._parts.items():
            used_slots = slots_of(v[name], row_S1, indices[:, part], self._block_size)
            spare_slot = self._spare_blocks[name] * self._block_size
            slots[:, part] = np.where(is_used[:, part], used_slots, spare_slot)
        if "before" in v:
            is_text = (is_used & (offsets < 0))[:, :first]
            before = np.where(is_text, indices[:, :first] - 1, 0)
            before_slots = slots_of(v[PAGES], row_S1, before, self._block_size)
            v["before"][:] = np.where(is_text, before_slots, -1)
        start = 0
        for number, queries in enumerate(self.sizes):
            part = slice(start, start + queries)
            start = part.stop
            v[f"slots {number}"][:] = slots[:, part]
            v[f"limits {number}"][:] = limits[:, part]
            v[f"words {number}"][:] = words[:, part]
            v[f"counts {number}"][:] = is_used[:, part].sum(1)
            v[f"positions {number}"][:] = positions[:, part]
            v[f"short positions {number}"][:] = positions[:, part]
            v[f"num keys {number}"][:] = end_S + tables.num_seen[:, number]

    def _fill_chains(self, tables: _Tables) -> None:
        """Fill chain lengths, and the row of each node in the target's pass."""
        v = self._views
        shape = self.shape
        sequence_S1 = np.arange(shape.sequences)[:, None]
        v["lengths"][:] = tables.lengths
        v["nodes"][:] = tables.nodes + (1 + shape.num_nodes) * sequence_S1[:, :, None]
        if shape.num_drafts:
            v["tokens"][:] = tables.tokens + shape.num_nodes * sequence_S1

    def _fill_distributions(self, rows: Sequence[Row], end_S: Ints, is_dead_C: Bools) -> None:
        """Fill the operands of distributions and draws; padding gets neutral values."""
        v = self._views
        v["temperature"][:] = 1.0
        v["temperature"][: len(rows)] = [0.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
        for name in self.shape.distributions.filters:
            v[name][:] = FILTERS[name]
            v[name][: len(rows)] = [getattr(row.sampling, name) for row in rows]
        seed_S = np.zeros(self.shape.sequences, dtype=np.int64)
        seed_S[: len(rows)] = [row.sampling.seed for row in rows]
        layout = self._layout
        seed_C = seed_S[layout.request_C]
        end_C = end_S[layout.request_C]
        v["noise"][:] = draw_numbers(self._kernels, seed_C, end_C, layout.rank_C, layout.max_length)
        # The score of a dead chain becomes the largest, so that it wins no race.
        v["noise"][SCORE_PART, is_dead_C] = -np.inf


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
    count = shape.sequences
    num_chains = layout.num_chains
    filters = shape.distributions.filters
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
        *(Field(name, np.int64 if name == "top_k" else np.float32, (count,)) for name in filters),
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
        rows = (count, queries)
        fields += [
            Field(f"positions {number}", np.int64, rows),
            Field(f"short positions {number}", np.int32, rows),
            Field(f"slots {number}", np.int64, rows),
            Field(f"limits {number}", np.int32, rows),
            Field(f"words {number}", np.int64, rows),
            Field(f"num keys {number}", np.int32, (count,)),
            Field(f"counts {number}", np.int32, (count,)),
        ]
    return fields
