"""Sequences of a pass that attend in one call.

A call for every sequence costs more than its work. Sequences of about the same size are padded
to one shape here, and one call serves them all. Their keys and values are gathered into a
buffer that every layer uses again. The buffer is small enough to stay in the processor's
cache. A long prompt or a lone sequence is a group of one: it is not padded, and not gathered
if its blocks are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.inputs import Bools, Ints, StepLayout, slots_of
from engine.attention.tensors import KVTensors
from engine.kernels.transfer import to_device

_MOST_QUERIES = 64
_GATHERED_BYTES = 4 << 20
"""Bytes of one layer's K/V that are gathered at once."""
_PADDING = 0.25
"""Largest share of padding among a sequence's keys."""


class ScoreOptions(NamedTuple):
    """Options of a layer's attention."""

    softcap: float | None = None
    sinks: Tensor | None = None
    """[H] Logit of each head that takes its share of the weights and has no value."""
    chunk: int | None = None
    """Positions of a chunk: a token sees the keys of one chunk; None if it sees all."""


@dataclass
class Group:
    """B sequences of Q queries and K keys each."""

    shape: tuple[int, int, int]
    rows: Tensor | slice
    """Rows of the B * Q queries in the flat pass; padding repeats a sequence's first row."""
    slots: Tensor | slice
    """[B * K] Slots of the keys; a slice is read without a copy."""
    visible: Tensor | None
    """[B, Q, K]; None if every query sees every key. Padding queries see one key."""
    positions: Callable[[], tuple[Tensor, Tensor]]
    """([B, Q] positions of queries, [B, K] of keys), for sliding windows."""
    real: Tensor | None
    """Indices of the queries that are not padding; None for all."""
    _bias: dict[tuple[int | None, int | None, int], Tensor | None] = field(default_factory=dict)

    @cached_property
    def real_rows(self) -> Tensor | slice:
        """Return the rows of the flat pass that the group's results belong to."""
        if self.real is None or isinstance(self.rows, slice):
            return self.rows
        return self.rows[self.real]

    def bias(self, window: int | None, heads: int, dtype: torch.dtype, chunk: int | None = None) -> Tensor | None:
        """Return [B, 1, heads * Q, K] with -inf for keys that a query does not see.

        None if every query sees every key. window, chunk: positions of a sliding window or of a
        chunk, or None.
        """
        limits = (window, chunk, heads)
        if limits not in self._bias:
            visible = self.visible
            if window is not None or chunk is not None:
                near = self._near(window, chunk)
                visible = near if visible is None else visible & near
            bias = None
            if visible is not None:
                bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
                bias = bias.masked_fill_(~visible, -torch.inf)
                if heads > 1:
                    bias = bias.repeat(1, heads, 1)
                bias = bias.unsqueeze(1)
            self._bias[limits] = bias
        return self._bias[limits]

    def _near(self, window: int | None, chunk: int | None) -> Tensor:
        """Return [B, Q, K] whether a key is in the window, or in the chunk, of a query."""
        query_BQ, key_BK = self.positions()
        query_BQ1, key_B1K = query_BQ.unsqueeze(2), key_BK.unsqueeze(1)
        if chunk is not None:
            return query_BQ1 // chunk == key_B1K // chunk
        assert window is not None
        return query_BQ1 - key_B1K < window


def attend_group(
    group: Group,
    storage: KVTensors,
    layer: int,
    query: Tensor,
    scaling: float | None,
    kind: ScoreOptions,
    window: int | None,
) -> Tensor:
    """Return the attention of a group's queries [rows, H, D_v], in the order of `real_rows`.

    query: (1, H, T, D).
    """
    num_batch, num_queries, num_keys = group.shape
    keys, values = storage.read(layer, group.slots)
    value_dim = values.shape[-1]
    is_latent = layer in storage.latent
    if is_latent:
        # Torch's fused attention needs equal widths: the rest of K is weighed, too, and cut off.
        values = keys
    num_kv_heads = keys.shape[1]
    heads = query.shape[1] // num_kv_heads
    rows = group.rows
    whole = query[0]
    queries = whole[:, rows] if isinstance(rows, slice) else whole.index_select(1, rows)
    keys = keys.view(num_batch, num_keys, num_kv_heads, -1).transpose(1, 2)
    values = values.view(num_batch, num_keys, num_kv_heads, -1).transpose(1, 2)
    if num_batch == 1 and not (is_latent and num_queries <= _MOST_QUERIES):
        bias = group.bias(window, 1, query.dtype, kind.chunk)
        output = scaled_attention(queries.unsqueeze(0), keys, values, bias, scaling, kind)
        return output[0].transpose(0, 1)[..., :value_dim]
    # Query heads with the same keys become further queries of one head.
    folded = queries.reshape(num_kv_heads, heads, num_batch, num_queries, -1)
    folded = folded.permute(2, 0, 1, 3, 4)
    folded = folded.reshape(num_batch, num_kv_heads, heads * num_queries, -1)
    bias = group.bias(window, heads, query.dtype, kind.chunk)
    output = scaled_attention(folded, keys, values, bias, scaling, kind)
    unfolded = output.view(num_batch, num_kv_heads, heads, num_queries, -1).permute(0, 3, 1, 2, 4)
    result = unfolded.reshape(num_batch * num_queries, num_kv_heads * heads, -1)[..., :value_dim]
    return result if group.real is None else result[group.real]


def scaled_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, kind: ScoreOptions
) -> Tensor:
    """Attend: query (B, H, Q, D), key and value (B, H_kv, K, D) -> (B, H, Q, D_v).

    mask: is added to the scores. The query heads of a K/V head may be folded into further queries
    of a single head (`attend_group`); Q then counts the queries of all folded heads, head by head.
    """
    if kind.softcap is not None or kind.sinks is not None:
        return _explicit(query, key, value, mask, scaling, kind)
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, kind: ScoreOptions
) -> Tensor:
    """Attend by matrix products."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)).float() * scale
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    if mask is not None:
        scores = scores + mask
    if kind.sinks is None:
        return scores.softmax(-1).to(value.dtype) @ value
    # [H] -> [H_kv, Q of this call]: folded queries are ordered group by group.
    sinks = kind.sinks.float().view(query.shape[1], -1)
    sinks = sinks.repeat_interleave(scores.shape[2] // sinks.shape[1], 1)
    column = sinks[None, :, :, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value


def groups_of(batch: StepLayout, block_size: int, token_bytes: int, device: torch.device) -> list[Group]:
    """Return the groups of a pass. token_bytes: K and V of one token in one layer."""
    num_keys = (batch.num_keys - batch.first_keys).tolist()
    members = _alike(batch.counts.tolist(), num_keys, token_bytes)
    return [_group(batch, np.array(numbers), block_size, device) for numbers in members]


def _alike(num_queries: Sequence[int], num_keys: Sequence[int], token_bytes: int) -> Iterator[list[int]]:
    """Yield the numbers of sequences that form a group.

    They have similar numbers of queries and keys, and fit into the buffer.
    """

    def size(number: int) -> tuple[int, int]:
        """Return (bits of the number of queries, minus the number of keys)."""
        return (num_queries[number] - 1).bit_length(), -num_keys[number]

    members: list[int] = []
    for number in sorted(range(len(num_queries)), key=size):
        if members:
            most_keys = num_keys[members[0]]
            joins = (
                num_queries[number] <= _MOST_QUERIES
                and size(number)[0] == size(members[0])[0]
                and num_keys[number] >= most_keys * (1 - _PADDING)
                and (len(members) + 1) * most_keys * token_bytes <= _GATHERED_BYTES
            )
            if not joins:
                yield sorted(members)
                members = []
        members.append(number)
    yield sorted(members)


def _group(batch: StepLayout, numbers: Ints, block_size: int, device: torch.device) -> Group:
    """Return the group of the sequences with these numbers."""
    num_rows_B1 = batch.counts[numbers][:, None]
    first_row_B1 = batch.starts[numbers][:, None].astype(np.int64)
    first_key_B1 = batch.first_keys[numbers][:, None]
    num_keys_B1 = batch.num_keys[numbers][:, None] - first_key_B1
    num_queries = int(num_rows_B1.max())
    num_keys = int(num_keys_B1.max())
    place_Q = np.arange(num_queries)
    place_K = np.arange(num_keys)
    is_row_BQ = place_Q < num_rows_B1
    row_BQ: Ints = first_row_B1 + np.where(is_row_BQ, place_Q, 0)
    # A padding key is the first key again.
    key_BK: Ints = first_key_B1.astype(np.int64) + np.where(place_K < num_keys_B1, place_K, 0)
    visible_BQK = _visible(batch, numbers, row_BQ, num_keys)
    visible_BQK[~is_row_BQ] = place_K == 0
    slots = slots_of(batch.pages, numbers[:, None], key_BK, block_size)
    return Group(
        shape=(len(numbers), num_queries, num_keys),
        rows=_in_order(row_BQ, device),
        slots=_in_order(slots, device),
        visible=None if visible_BQK.all() else to_device(visible_BQK, device),
        positions=lambda: (
            to_device(batch.positions_T[row_BQ], device),
            to_device(_key_positions(batch, numbers, key_BK), device),
        ),
        real=None if is_row_BQ.all() else to_device(np.flatnonzero(is_row_BQ), device),
    )


def _in_order(places: Ints, device: torch.device) -> Tensor | slice:
    """Return places flat; contiguous places as a slice, which is read without a copy."""
    flat = places.reshape(-1)
    first = int(flat[0])
    stop = first + len(flat)
    if flat[-1] == stop - 1 and bool((np.diff(flat) == 1).all()):
        return slice(first, stop)
    return to_device(flat, device)


def _visible(batch: StepLayout, numbers: Ints, row_BQ: Ints, num_keys: int) -> Bools:
    """Return which keys each query sees [B, Q, K]. row_BQ: rows of the queries in the pass."""
    first_key_B1 = batch.first_keys[numbers][:, None]
    visible_BQK: Bools = np.arange(num_keys) < (batch.limits[row_BQ] - first_key_B1)[:, :, None]
    for visible_QK, number in zip(visible_BQK, numbers.tolist(), strict=True):
        ancestry = batch.sequences[number].nodes.ancestry
        entering, all_nodes = ancestry.shape
        if entering:
            known = int(batch.num_inputs_B[number])
            seen = int(batch.ends[number] - batch.first_keys[number])
            visible_QK[known : known + entering, seen : seen + all_nodes] = ancestry
    return visible_BQK


def _key_positions(batch: StepLayout, numbers: Ints, key_BK: Ints) -> Ints:
    """Return the positions of keys [B, K]."""
    positions_BK = key_BK.copy()
    for positions_K, number in zip(positions_BK, numbers.tolist(), strict=True):
        num_nodes = int(batch.num_keys[number] - batch.ends[number])
        seen = int(batch.ends[number] - batch.first_keys[number])
        positions_K[seen : seen + num_nodes] = batch.node_positions[number, :num_nodes]
    return positions_BK
