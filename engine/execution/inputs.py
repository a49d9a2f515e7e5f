"""From rows and trees to the flat batch of a forward pass.

Layout of a sequence in a pass: its known tokens, then its drafted nodes. Known tokens see
everything before them; a node sees all known tokens and its own ancestors. Nodes lie in the
slots behind the last known token, in node order, at position root + depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cache.tensors import slots_of

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Nodes:
    """Drafted nodes of one sequence that enter a pass, and those already in the cache."""

    tokens: Sequence[int]
    depths: Sequence[int]
    """Depth of each entering node; the first drafted level has depth 1."""
    cached_depths: Sequence[int]
    """Depth of the nodes whose K/V earlier passes of this step wrote."""
    ancestry: Bools
    """[entering, cached + entering]: which nodes each entering node may see."""


NO_NODES = Nodes((), (), (), np.zeros((0, 0), dtype=np.bool_))


@dataclass(frozen=True)
class SequenceInput:
    """One sequence's part of a pass."""

    known: Sequence[int]
    first_index: int
    """Index of the first known token; with no known tokens, the index of the first node."""
    block_ids: Sequence[int]
    nodes: Nodes
    wanted: slice
    """Which of the part's tokens need logits, counted within the part."""
    first_key: int = 0
    """Index of the first token that is seen at all."""


@dataclass(frozen=True)
class SegmentInput:
    """A segment before its tensors are moved to the device."""

    query: slice
    slots: slice | Ints
    visible: Bools | None
    query_positions: Ints
    key_positions: Ints


@dataclass(frozen=True)
class PassInput:
    """A flat batch, still on the host."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    segments: list[SegmentInput]
    """What each sequence's attention sees; none where a kernel works from the pages (`paged.py`)."""
    wanted: Ints
    """Rows of the batch whose logits are returned, in order."""


def build(sequences: Sequence[SequenceInput], block_size: int, with_segments: bool = True) -> PassInput:
    """Concatenate the parts of all sequences; the segments only where they are wanted."""
    token_ids: list[int] = []
    positions, slots, wanted, segments = [], [], [], []
    for part in sequences:
        start = len(token_ids)
        token_ids += part.known
        token_ids += part.nodes.tokens
        places = _places(part, block_size)
        positions.append(places.query_positions)
        slots.append(places.own_slots)
        if with_segments:
            segments.append(_segment(part, start, places))
        wanted.append(np.arange(start, len(token_ids), dtype=np.int64)[part.wanted])
    return PassInput(
        np.asarray(token_ids, dtype=np.int64),
        np.concatenate(positions),
        np.concatenate(slots),
        segments,
        np.concatenate(wanted),
    )


class _Places(NamedTuple):
    """Where a part's queries and keys lie."""

    query_positions: Ints
    key_slots: slice | Ints
    own_slots: Ints
    node_positions: Ints


def _places(part: SequenceInput, block_size: int) -> _Places:
    nodes, end = part.nodes, part.first_index + len(part.known)
    num_cached = len(nodes.cached_depths)
    node_positions = end - 1 + np.asarray([*nodes.cached_depths, *nodes.depths], dtype=np.int64)
    query_positions = np.concatenate([np.arange(part.first_index, end, dtype=np.int64), node_positions[num_cached:]])
    return _Places(query_positions, *_slots(part, end, num_cached, block_size), node_positions)


def _segment(part: SequenceInput, start: int, places: _Places) -> SegmentInput:
    end = part.first_index + len(part.known)
    known_positions = np.arange(part.first_key, end, dtype=np.int64)
    return SegmentInput(
        query=slice(start, start + len(places.query_positions)),
        slots=places.key_slots,
        visible=_visible(part, end - part.first_key, len(part.nodes.cached_depths)),
        query_positions=places.query_positions,
        key_positions=np.concatenate([known_positions, places.node_positions]),
    )


def _visible(part: SequenceInput, num_seen: int, num_cached: int) -> Bools | None:
    """[queries, keys]; None for a lone decoding token, which sees everything. `num_seen`: keys of known tokens."""
    num_known, num_nodes = len(part.known), len(part.nodes.tokens)
    if num_known == 1 and num_nodes == 0 and num_cached == 0:
        return None
    visible = np.zeros((num_known + num_nodes, num_seen + num_cached + num_nodes), dtype=np.bool_)
    if num_known > 1:
        visible[:num_known, :num_seen] = np.tri(num_known, num_seen, num_seen - num_known, dtype=np.bool_)
    visible[max(0, num_known - 1) :, :num_seen] = True
    visible[num_known:, num_seen:] = part.nodes.ancestry
    return visible


def _slots(part: SequenceInput, end: int, num_cached: int, block_size: int) -> tuple[slice | Ints, Ints]:
    """(slots of all keys, slots of the entering tokens); the keys' as a slice where the blocks follow each other."""
    last = end + num_cached + len(part.nodes.tokens)
    blocks = tuple(part.block_ids[: -(-last // block_size)])
    if blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
        first = blocks[0] * block_size
        known = np.arange(first + part.first_index, first + end, dtype=np.int64)
        nodes = np.arange(first + end + num_cached, first + last, dtype=np.int64)
        own = nodes if not len(known) else known if not len(nodes) else np.concatenate([known, nodes])
        return slice(first + part.first_key, first + last), own
    slots = slots_of(blocks, block_size, part.first_key, last)
    num_seen = end - part.first_key
    own = np.concatenate([slots[num_seen - len(part.known) : num_seen], slots[num_seen + num_cached :]])
    return slots, own


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array as a tensor on `device`, without waiting for the copy."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
