"""Small passes replayed as CUDA graphs: a few fixed shapes, recorded at start, into which every decode step is padded.

A pass of R sequences with up to Q queries each runs as the smallest recorded shape that has room for it. Buffers never
move: the host writes two arrays into them (pages and masks; token ids, positions and slots), and the recorded kernels
run without Python. Sequences that are padding have no rows; rows that are padding see nothing, and their K/V goes to a
block that nobody reads. Nothing is recorded while requests are served, as that would stop all of them: prompts, and
steps too large for the recorded shapes, run as they are.

Without CUDA nothing is recorded and the same padded pass is computed: that is how padding is tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache.tensors import KVTensors
from engine.execution.attention import AttentionMetadata
from engine.execution.inputs import NO_NODES, Ints, PassInput, SequenceInput, build
from engine.execution.paged import Paged, PagedInput, moved, packed, pages_of
from engine.transfer import fill

log = logging.getLogger("polydraft")

_QUERIES = (1, 2, 4, 6, 8, 12, 16, 21, 24, 32, 48, 64)
_WORD = 64
# Progress is reported after every so many recordings.
_TOLD = 16
# Logits of a padded pass; larger steps gain nothing by being replayed.
_LOGIT_BYTES = 256 << 20

Compute = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]
"""Logits [T, V] from token ids, positions, metadata and the wanted rows."""


class Shape(NamedTuple):
    """What a recorded pass has room for."""

    sequences: int
    queries: int

    @property
    def rows(self) -> int:
        """T."""
        return self.sequences * self.queries

    def has_room(self, num_sequences: int, most_queries: int) -> bool:
        """Whether a pass of so many sequences, and queries of each, fits."""
        return num_sequences <= self.sequences and most_queries <= self.queries


def menu(most_sequences: int, vocab_size: int) -> list[Shape]:
    """The shapes that are recorded for steps of up to so many sequences, the largest first."""
    counts = [1 << power for power in range((most_sequences - 1).bit_length() + 1)]
    shapes = [Shape(count, queries) for count in counts for queries in _QUERIES]
    return sorted((s for s in shapes if s.rows * vocab_size * 4 <= _LOGIT_BYTES), key=lambda s: s.rows, reverse=True)


def logit_bytes(most_sequences: int, vocab_size: int) -> int:
    """Memory of the logits that all recorded shapes share."""
    return max((shape.rows for shape in menu(most_sequences, vocab_size)), default=0) * vocab_size * 4


@dataclass
class _Recorded:
    """A shape's buffers, and what was recorded over them."""

    numbers: Tensor
    """[words of the pages, in 32 bits], as `paged.packed` orders them."""
    long: Tensor
    """[3, T] token ids, positions and slots."""
    paged: Paged
    graph: torch.cuda.CUDAGraph | None = None


@contextmanager
def recorder() -> Iterator[Callable[[Callable[[], None]], torch.cuda.CUDAGraph]]:
    """Gives a function that records work as a CUDA graph. All graphs share one stream and one memory pool, so that only
    one may be replayed at a time.

    Work is done once before it is recorded, which compiles and allocates what must not be recorded.
    """
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
        return graph

    try:
        yield record
        current.wait_stream(stream)
    finally:
        # A recording that fails leaves its stream in use.
        torch.cuda.set_stream(current)


class Graphs:
    """The recorded passes of one model."""

    def __init__(self, storage: KVTensors, page_size: int, spare_slot: int, vocab_size: int, most_pages: int) -> None:
        """spare_slot: where the K/V of padding goes; most_pages: of the longest text with its drafts."""
        self._storage = storage
        self._page_size = page_size
        self._spare_slot = spare_slot
        self._vocab_size = vocab_size
        self._most_pages = most_pages
        self._device = storage.keys.device
        self._recorded: dict[Shape, _Recorded] = {}
        self._logits = torch.empty((0, vocab_size), device=self._device)
        """[rows of the largest shape, V]: every pass's logits are read before the next pass runs."""

    @property
    def num_recorded(self) -> int:
        """Shapes that are replayed."""
        return len(self._recorded)

    def record(self, compute: Compute, most_sequences: int, progress: Callable[[str], None]) -> None:
        """Record every shape of the menu. A model whose passes cannot be recorded is served without graphs."""
        shapes = menu(most_sequences, self._vocab_size)
        self._logits = self._logits.new_empty((max((s.rows for s in shapes), default=0), self._vocab_size))
        if self._device.type != "cuda":
            self._recorded = {shape: self._buffers(shape) for shape in shapes}
            return
        try:
            with recorder() as record:
                for number, shape in enumerate(shapes):
                    if number % _TOLD == 0:
                        progress(f"recording CUDA graphs: {number} of {len(shapes)}")
                    recorded = self._buffers(shape)
                    recorded.graph = record(partial(self._run, compute, recorded))
                    self._recorded[shape] = recorded
        except Exception as error:  # an operation that cannot be recorded
            self._recorded.clear()
            log.warning("passes run without CUDA graphs: %s", error)

    def run(self, compute: Compute, batch: PassInput, host: PagedInput, drawn_M: Tensor | None) -> Tensor | None:
        """Logits [N, V] at the wanted rows; None where the pass fits no recorded shape. host: `pages_of(batch)`."""
        shape = self._shape_of(host)
        if shape is None:
            return None
        rows = rows_of(host, shape)
        long = np.zeros((3, shape.rows), dtype=np.int64)
        long[2] = self._spare_slot
        long[:, rows] = batch.token_ids_T, batch.positions_T, batch.slots_T
        recorded = self._recorded[shape]
        pages = pad(host, shape, rows, self._most_pages)
        fill(recorded.numbers, packed(pages))
        fill(recorded.long, long)
        if drawn_M is not None:
            recorded.long[0].index_copy_(0, moved(rows[batch.drawn_M], self._device), drawn_M)
        if recorded.graph is not None:
            recorded.graph.replay()
        else:
            self._run(compute, recorded)
        # A copy: the next pass writes into the same memory.
        return self._logits.index_select(0, moved(rows[batch.wanted_N], self._device))

    def _shape_of(self, host: PagedInput) -> Shape | None:
        """The smallest recorded shape that has room for a pass; None where none has."""
        size = len(host.counts), int(host.counts.max(initial=0))
        if host.words.shape[1] > 1 or host.pages.shape[1] > self._most_pages:
            return None
        return min((shape for shape in self._recorded if shape.has_room(*size)), key=lambda s: s.rows, default=None)

    def _run(self, compute: Compute, recorded: _Recorded) -> None:
        token_ids, positions, slots = recorded.long
        metadata = AttentionMetadata(self._storage, slots, paged=recorded.paged)
        wanted = torch.arange(len(slots), device=self._device)
        self._logits[: len(slots)].copy_(compute(token_ids, positions, metadata, wanted))

    def _buffers(self, shape: Shape) -> _Recorded:
        """The buffers of a shape, holding a pass of padding alone."""
        nothing = build([SequenceInput((), 0, (0,), NO_NODES, slice(0))], self._page_size)
        none = pad(pages_of(nothing), shape, np.zeros(0, dtype=np.int64), self._most_pages)
        numbers = moved(packed(none), self._device).clone()
        most_keys = self._most_pages * self._page_size
        paged = Paged.over(numbers, none, self._page_size, shape.queries, most_keys, is_padded=True)
        long = torch.zeros((3, shape.rows), dtype=torch.int64, device=self._device)
        long[2] = self._spare_slot
        return _Recorded(numbers, long, paged)


def rows_of(host: PagedInput, shape: Shape) -> Ints:
    """Where each row of a pass lies in the padded one."""
    number = np.repeat(np.arange(len(host.counts)), host.counts)
    place: Ints = number * shape.queries + np.arange(len(number)) - host.starts[number]
    return place.astype(np.int64)


def pad(host: PagedInput, shape: Shape, rows: Ints, most_pages: int) -> PagedInput:
    """A pass in the given shape, its page table as wide as the longest text's."""
    count = len(host.counts)

    def by_sequence(values: np.ndarray, *width: int) -> np.ndarray:
        result = np.zeros((shape.sequences, *width), dtype=values.dtype)
        kept = values[:, : width[0]] if width else values
        result[(slice(count), *(slice(size) for size in kept.shape[1:]))] = kept
        return result

    def by_row(values: np.ndarray) -> np.ndarray:
        result = np.zeros((shape.rows, *values.shape[1:]), dtype=values.dtype)
        result[rows] = values
        return result

    return PagedInput(
        pages=by_sequence(host.pages, most_pages),
        starts=np.arange(shape.sequences, dtype=np.int32) * shape.queries,
        counts=by_sequence(host.counts),
        first_keys=by_sequence(host.first_keys),
        ends=by_sequence(host.ends),
        num_keys=by_sequence(host.num_keys),
        node_positions=by_sequence(host.node_positions, _WORD),
        limits=by_row(host.limits),
        words=by_row(host.words),
        positions=by_row(host.positions),
    )
