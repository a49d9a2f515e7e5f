"""Small passes replayed as CUDA graphs: a few fixed shapes, into which every decode step is padded.

A pass of R sequences with up to Q queries each gets the next shape of the menu. Its buffers never move: the host writes
one array of numbers into them, and the recorded kernels run without Python. Sequences that are padding have no rows;
rows that are padding see nothing, and their K/V goes to a block that nobody reads. Prompts, and steps too large for the
menu, run as they are.

Without CUDA nothing is recorded and the same padded pass is computed: that is how padding is tested.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cache.tensors import KVTensors
from engine.execution.attention import AttentionMetadata
from engine.execution.inputs import Ints, PassInput
from engine.execution.paged import Paged, PagedInput, moved, packed, pages_of

log = logging.getLogger("polydraft")

_QUERIES = (1, 2, 4, 6, 8, 12, 16, 21, 24, 32, 48, 64)
_FEWEST_KEYS = 512
_WORD = 64
# Logits of a padded pass; larger steps gain nothing by being replayed.
_LOGIT_BYTES = 256 << 20
_MOST_SHAPES = 64

Compute = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]
"""Logits [T, V] from token ids, positions, metadata and the wanted rows."""


class Shape(NamedTuple):
    """What a recorded pass has room for."""

    sequences: int
    queries: int
    keys: int
    words: int

    @property
    def rows(self) -> int:
        """T."""
        return self.sequences * self.queries


@dataclass
class _Recorded:
    """A shape's buffers, and what was recorded over them."""

    numbers: Tensor
    """[words of the pages, in 32 bits], as `paged.packed` orders them."""
    long: Tensor
    """[3, T] token ids, positions and slots."""
    paged: Paged
    graph: torch.cuda.CUDAGraph | None = None
    logits: Tensor | None = None


class Graphs:
    """The recorded passes of one model."""

    def __init__(self, compute: Compute, storage: KVTensors, page_size: int, spare_slot: int, vocab_size: int) -> None:
        """spare_slot: where the K/V of padding goes."""
        self._compute = compute
        self._storage = storage
        self._page_size = page_size
        self._spare_slot = spare_slot
        self._vocab_size = vocab_size
        self._device = storage.keys.device
        self._recorded: dict[Shape, _Recorded] = {}
        # One memory for all: passes run one after the other, and what they give is copied out.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._works = True

    def run(self, batch: PassInput, drawn_T: Tensor | None) -> Tensor | None:
        """Logits [N, V] at the wanted rows; None where the pass does not fit the menu."""
        if not self._works:
            return None
        host = pages_of(batch)
        shape = shape_of(host)
        if shape is None or shape.rows * self._vocab_size * 4 > _LOGIT_BYTES:
            return None
        rows = rows_of(host, shape)
        pages = pad(host, shape, rows, self._page_size)
        long = np.zeros((3, shape.rows), dtype=np.int64)
        long[2] = self._spare_slot
        long[1:, rows] = batch.positions_T, batch.slots_T
        if drawn_T is None:
            long[0, rows] = batch.token_ids_T
        recorded = self._recorded.get(shape)
        if recorded is None:
            if len(self._recorded) >= _MOST_SHAPES:
                del self._recorded[next(iter(self._recorded))]
            recorded = self._record(pages, long, shape)
            if not self._works:
                self._recorded.clear()
                return None
            self._recorded[shape] = recorded
        else:
            recorded.numbers.copy_(moved(packed(pages), self._device), non_blocking=True)
            recorded.long.copy_(moved(long, self._device), non_blocking=True)
        if drawn_T is not None:
            recorded.long[0].index_copy_(0, moved(rows, self._device), drawn_T)
        if recorded.graph is not None:
            recorded.graph.replay()
            logits = recorded.logits
        else:
            logits = self._run(recorded)
        assert logits is not None
        # A copy: the next replay writes into the same memory.
        return logits.index_select(0, moved(rows[batch.wanted_N], self._device))

    def _run(self, recorded: _Recorded) -> Tensor:
        token_ids, positions, slots = recorded.long
        metadata = AttentionMetadata(self._storage, slots, paged=recorded.paged)
        return self._compute(token_ids, positions, metadata, torch.arange(len(slots), device=self._device))

    def _record(self, pages: PagedInput, long: Ints, shape: Shape) -> _Recorded:
        numbers = moved(packed(pages), self._device).clone()
        paged = Paged.over(numbers, pages, self._page_size, shape.queries, shape.keys)
        recorded = _Recorded(numbers, moved(long, self._device).clone(), paged)
        if self._device.type != "cuda":
            return recorded
        try:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # compiles and allocates what is not to be recorded
                    self._run(recorded)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                recorded.logits = self._run(recorded)
            recorded.graph = graph
        except Exception as error:  # a model whose passes cannot be recorded is served without graphs
            self._works = False
            log.warning("passes run without CUDA graphs: %s", error)
        return recorded


def shape_of(host: PagedInput) -> Shape | None:
    """The smallest shape of the menu that has room for a pass; None for a pass that is too large."""
    most = int(host.counts.max(initial=0))
    if most > _QUERIES[-1]:
        return None
    keys = max(_FEWEST_KEYS, int(host.num_keys.max(initial=1)))
    return Shape(
        sequences=1 << (len(host.counts) - 1).bit_length(),
        queries=_QUERIES[bisect_left(_QUERIES, most)],
        keys=1 << (keys - 1).bit_length(),
        words=host.words.shape[1],
    )


def rows_of(host: PagedInput, shape: Shape) -> Ints:
    """Where each row of a pass lies in the padded one."""
    number = np.repeat(np.arange(len(host.counts)), host.counts)
    place: Ints = number * shape.queries + np.arange(len(number)) - host.starts[number]
    return place.astype(np.int64)


def pad(host: PagedInput, shape: Shape, rows: Ints, page_size: int) -> PagedInput:
    """A pass in the given shape."""
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
        pages=by_sequence(host.pages, -(-shape.keys // page_size)),
        starts=np.arange(shape.sequences, dtype=np.int32) * shape.queries,
        counts=by_sequence(host.counts),
        first_keys=by_sequence(host.first_keys),
        ends=by_sequence(host.ends),
        num_keys=by_sequence(host.num_keys),
        node_positions=by_sequence(host.node_positions, shape.words * _WORD),
        limits=by_row(host.limits),
        words=by_row(host.words),
        positions=by_row(host.positions),
    )
