"""Paged, tree-masked attention for unmodified transformers models.

One function is registered with transformers under `HOOK`; a model loaded with that attention
implementation calls it in every layer with rotated q and k, and whatever object was passed to the
model as the keyword `segments` arrives here. No mask function is registered under the name, so
transformers builds no mask at all. (transformers >= 5.17; `docs/architecture.md`.)

A *segment* is one sequence's part of a flat batch of T tokens: its queries, and the slots of all
the keys they may look at (committed prefix first, then this pass's own tokens).

The plain path is one call per segment, on any device. It is the oracle of every faster backend, such as segments that
attend together (`batches.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from engine.cache.tensors import KVTensors
from engine.execution.batches import Batch, attend_batch
from engine.execution.paged import Paged
from engine.execution.scaled import Kind, scaled_attention

HOOK = "polydraft_tree"


@dataclass
class Segment:
    """The queries of one sequence in a flat pass, and the keys they may see."""

    query: slice
    """Rows of the flat batch."""
    slots: Tensor | slice
    """Slots of the keys in order; a slice where they are contiguous (read without a copy)."""
    visible: Tensor | None
    """[queries, keys] bool; None when every query sees every key."""
    query_positions: Tensor
    key_positions: Tensor
    _windowed: dict[int, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """[queries, keys] visibility inside a sliding window of `window` positions (None: no window)."""
        if window is None:
            return self.visible
        if window not in self._windowed:
            distance = self.query_positions.unsqueeze(1) - self.key_positions.unsqueeze(0)
            near = distance < window
            if bool(near.all()):
                self._windowed[window] = self.visible
            else:
                self._windowed[window] = near if self.visible is None else near & self.visible
        return self._windowed[window]


@dataclass
class Segments:
    """What the hook needs to know about a flat pass."""

    storage: KVTensors
    slots_T: Tensor | slice
    """Where the K/V of the pass's own tokens is written."""
    segments: list[Segment]
    """Each attends in a call of its own,"""
    batches: list[Batch] = field(default_factory=list)
    """and these several sequences at once."""
    paged: Paged | None = None
    """Set where one kernel does it all, and there are no segments."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The hook. query (1, H, T, D), key and value (1, H_kv, T, D) -> ((1, T, H, D_v), None)."""
    assert segments is not None, "the model was called without segments"
    keys, values = segments.storage.keys[module.layer_idx], segments.storage.values[module.layer_idx]
    keys[segments.slots_T] = key[0].transpose(0, 1)
    values[segments.slots_T] = value[0].transpose(0, 1)
    alone, batches, kind = segments.segments, segments.batches, Kind(softcap, s_aux)
    if segments.paged is not None:
        from engine.execution.triton_attention import attend_paged  # Triton is there where a kernel was chosen

        storage, layer = segments.storage, module.layer_idx
        return attend_paged(segments.paged, storage, layer, query, scaling, kind, sliding_window), None
    if len(alone) == 1 and not batches:
        return _attend_segment(alone[0], keys, values, query, scaling, kind, sliding_window), None
    output = query.new_empty(1, query.shape[2], query.shape[1], values.shape[-1])
    for segment in alone:
        output[:, segment.query] = _attend_segment(segment, keys, values, query, scaling, kind, sliding_window)
    for batch in batches:
        part = attend_batch(batch, segments.storage, module.layer_idx, query, scaling, kind, sliding_window)
        output[0].index_copy_(0, batch.rows, part)
    return output, None


def _attend_segment(
    segment: Segment, keys: Tensor, values: Tensor, query: Tensor, scaling: float | None, kind: Kind, window: int | None
) -> Tensor:
    """Attention of one segment out of a pass's queries: (1, queries, H, D_v)."""
    segment_keys = keys[segment.slots].transpose(0, 1).unsqueeze(0)
    segment_values = values[segment.slots].transpose(0, 1).unsqueeze(0)
    queries = query[:, :, segment.query]
    output = scaled_attention(queries, segment_keys, segment_values, segment.mask(window), scaling, kind)
    return output.transpose(1, 2)


def register() -> None:
    """Make `HOOK` known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(HOOK, attend)
