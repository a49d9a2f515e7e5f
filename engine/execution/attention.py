"""Paged, tree-masked attention for unmodified transformers models.

One function is registered with transformers under `HOOK`; a model loaded with that attention
implementation calls it in every layer with rotated q and k, and whatever object was passed to the
model as the keyword `segments` arrives here. No mask function is registered under the name, so
transformers builds no mask at all. (transformers >= 5.17; `docs/architecture.md`.)

A *segment* is one sequence's part of a flat batch of T tokens: its queries, and the slots of all
the keys they may look at (committed prefix first, then this pass's own tokens).

This is the plain path: one scaled-dot-product call per segment, on any device. It is the oracle
of every faster backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.cache.tensors import KVTensors

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
    outputs = []
    for segment in segments.segments:
        queries = query[:, :, segment.query]
        segment_keys = keys[segment.slots].transpose(0, 1).unsqueeze(0)
        segment_values = values[segment.slots].transpose(0, 1).unsqueeze(0)
        mask = segment.mask(sliding_window)
        if softcap is None and s_aux is None:
            output = scaled_dot_product_attention(
                queries,
                segment_keys,
                segment_values,
                attn_mask=mask,
                scale=scaling,
                enable_gqa=queries.shape[1] != segment_keys.shape[1],
            )
        else:
            output = _explicit(queries, segment_keys, segment_values, mask, scaling, softcap, s_aux)
        outputs.append(output.transpose(1, 2))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention by matrix products, for score softcapping and attention sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value


def register() -> None:
    """Make `HOOK` known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(HOOK, attend)
