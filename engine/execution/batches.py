"""Several sequences' attention in one call.

A call of its own for every sequence costs more than the work in it. Sequences of about the same size are padded to one
shape here, so that one call serves them all; their keys and values are gathered into a buffer that every layer uses
again, small enough to stay in the processor's cache. Long prompts and lone sequences keep a call of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.cache.tensors import KVTensors
from engine.execution.inputs import Bools, Ints, SegmentInput, to_device
from engine.execution.scaled import Kind, scaled_attention

_MOST_QUERIES = 64
# Keys and values of one layer that are gathered at once.
_GATHERED_BYTES = 4 << 20
# A sequence joins others when at most this share of its padded keys is padding.
_PADDING = 0.25


@dataclass(frozen=True)
class BatchInput:
    """B segments padded to Q queries and K keys, on the host."""

    shape: tuple[int, int, int]
    """(B, Q, K)."""
    query_rows: Ints
    """[B * Q] rows of the flat pass; the padding repeats a segment's first."""
    slots: Ints
    """[B * K] slots of the keys; likewise."""
    visible: Bools
    """[B, Q, K]; a padding query sees one key, and nobody sees a padding key."""
    query_positions: Ints
    key_positions: Ints
    places: Ints
    """Which of the B * Q queries are no padding."""


@dataclass
class Batch:
    """The same on the device."""

    shape: tuple[int, int, int]
    query_rows: Tensor
    slots: Tensor
    visible: Tensor
    query_positions: Tensor
    key_positions: Tensor
    places: Tensor
    rows: Tensor
    """Rows of the flat pass at `places`."""
    _bias: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @staticmethod
    def of(host: BatchInput, device: torch.device) -> Batch:
        """Move a batch to the device."""
        return Batch(
            host.shape,
            to_device(host.query_rows, device),
            to_device(host.slots, device),
            to_device(host.visible, device),
            to_device(host.query_positions, device),
            to_device(host.key_positions, device),
            to_device(host.places, device),
            to_device(host.query_rows[host.places], device),
        )

    def bias(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, groups * Q, K], -inf where a query does not see a key; `window` as in `Segment.mask`."""
        if (window, groups) not in self._bias:
            visible = self.visible
            if window is not None:
                visible = visible & (self.query_positions.unsqueeze(2) - self.key_positions.unsqueeze(1) < window)
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._bias[window, groups] = bias.repeat(1, groups, 1).unsqueeze(1)
        return self._bias[window, groups]


def attend_batch(
    batch: Batch,
    storage: KVTensors,
    layer: int,
    query: Tensor,
    scaling: float | None,
    kind: Kind,
    window: int | None,
) -> Tensor:
    """Attention of a batch's queries out of `query` (1, H, T, D): [rows, H, D_v], in the order of `batch.rows`."""
    num_batch, num_queries, num_keys = batch.shape
    keys, values = storage.gather(layer, batch.slots)
    num_kv_heads = keys.shape[1]
    groups = query.shape[1] // num_kv_heads
    # Query heads that share keys become further queries of one head.
    folded = query[0].index_select(1, batch.query_rows).view(num_kv_heads, groups, num_batch, num_queries, -1)
    output = scaled_attention(
        folded.permute(2, 0, 1, 3, 4).reshape(num_batch, num_kv_heads, groups * num_queries, -1),
        keys.view(num_batch, num_keys, num_kv_heads, -1).transpose(1, 2),
        values.view(num_batch, num_keys, num_kv_heads, -1).transpose(1, 2),
        batch.bias(window, groups, query.dtype),
        scaling,
        kind,
    )
    unfolded = output.view(num_batch, num_kv_heads, groups, num_queries, -1).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(num_batch * num_queries, num_kv_heads * groups, -1)[batch.places]


def group(segments: Sequence[SegmentInput], token_bytes: int) -> tuple[list[BatchInput], list[SegmentInput]]:
    """(batches, segments left alone); `token_bytes`: K and V of one token in one layer."""
    alone = [segment for segment in segments if len(segment.query_positions) > _MOST_QUERIES]
    batches = []
    for members in _alike([s for s in segments if len(s.query_positions) <= _MOST_QUERIES], token_bytes):
        if len(members) == 1:
            alone += members
        else:
            batches.append(_pad(members))
    return batches, alone


def _alike(segments: Sequence[SegmentInput], token_bytes: int) -> Iterator[list[SegmentInput]]:
    """Segments in groups of about the same number of queries and keys, small enough for the buffer."""
    members: list[SegmentInput] = []
    for segment in sorted(segments, key=_size):
        (queries, keys), count = _size(segment), len(members) + 1
        largest = _size(members[0]) if members else (queries, keys)
        fits = (
            queries == largest[0]
            and -keys >= -largest[1] * (1 - _PADDING)
            and count * -largest[1] * token_bytes <= _GATHERED_BYTES
        )
        if members and not fits:
            yield members
            members = []
        members.append(segment)
    if members:
        yield members


def _size(segment: SegmentInput) -> tuple[int, int]:
    """(queries up to the next power of two, minus the number of keys): in this order the first is the largest."""
    return (len(segment.query_positions) - 1).bit_length(), -len(segment.key_positions)


def _pad(members: Sequence[SegmentInput]) -> BatchInput:
    num_batch = len(members)
    num_queries = max(len(segment.query_positions) for segment in members)
    num_keys = max(len(segment.key_positions) for segment in members)
    query_rows = np.empty((num_batch, num_queries), dtype=np.int64)
    slots = np.empty((num_batch, num_keys), dtype=np.int64)
    query_positions, key_positions = np.zeros_like(query_rows), np.zeros_like(slots)
    visible = np.zeros((num_batch, num_queries, num_keys), dtype=np.bool_)
    visible[:, :, 0] = True
    places = []
    for i, segment in enumerate(members):
        queries, keys = len(segment.query_positions), len(segment.key_positions)
        query_rows[i, :queries] = np.arange(segment.query.start, segment.query.stop)
        query_rows[i, queries:] = segment.query.start
        own = np.arange(segment.slots.start, segment.slots.stop) if isinstance(segment.slots, slice) else segment.slots
        slots[i, :keys] = own
        slots[i, keys:] = own[0]
        query_positions[i, :queries], key_positions[i, :keys] = segment.query_positions, segment.key_positions
        visible[i, :queries, :keys] = True if segment.visible is None else segment.visible
        places.append(i * num_queries + np.arange(queries))
    return BatchInput(
        (num_batch, num_queries, num_keys),
        query_rows.reshape(-1),
        slots.reshape(-1),
        visible,
        query_positions,
        key_positions,
        np.concatenate(places),
    )
