"""Masks of a model's layers, as its own code builds them for transformers.

A mask function is called once at the start, next to an attention function that records. It names
the mask that reaches each layer: all earlier keys, a window of them, or the keys of a chunk. The
attention hook then builds the mask for its own passes. A mask with another meaning is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from engine.errors import LoadError

_NAME = "_polydraft_mask"


class LayerMask(NamedTuple):
    """Keys that a token of a layer sees, among the keys up to itself; at most one is set."""

    window: int | None = None
    """Number of the last positions."""
    chunk: int | None = None
    """Length of the text's chunks, of which a token sees its own."""


def mask_of(module: Any, window: int | None) -> LayerMask:
    """Return the mask of a layer; window: of its call, if no mask was recorded."""
    mask: LayerMask = getattr(module, _NAME, None) or LayerMask(window)
    return mask


def record_mask(module: Any, found: object) -> None:
    """Store the mask that reached a layer, by `named_mask`; raise LoadError if it has no name."""
    if found is None:
        raise LoadError("a layer's mask is neither causal, nor a sliding window, nor a chunk; it is not served")
    if isinstance(found, LayerMask):
        setattr(module, _NAME, found)


def register_masks(name: str) -> None:
    """Let models with this attention implementation get masks that `record_mask` stores."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(name, named_mask)


def named_mask(
    mask_function: Callable[..., Any] | None = None, local_size: int | None = None, **_: Any
) -> LayerMask | None:
    """Return the mask that a function of (batch, head, query, key) means; None for any other."""
    size = local_size or 0
    candidates = [LayerMask(), LayerMask(window=size), LayerMask(chunk=size)] if size else [LayerMask()]
    # Places on both sides of the borders of windows and chunks, and keys after the query.
    near = {place + step for place in (0, size, 2 * size, 3 * size) for step in (-2, -1, 0, 1, 2, 7)}
    places = sorted(place for place in near if place >= 0)
    pairs = [(query, key) for query in places for key in places]
    seen = [_at(mask_function, *pair) for pair in pairs]
    for mask in candidates:
        if seen == [_sees(mask, *pair) for pair in pairs]:
            return mask
    return None


def _at(mask_function: Callable[..., Any] | None, query: int, key: int) -> bool:
    if mask_function is None:
        return key <= query
    first, *places = (torch.tensor(number) for number in (0, query, key))
    return bool(mask_function(first, first, *places))


def _sees(mask: LayerMask, query: int, key: int) -> bool:
    """Whether a token at a position sees a key."""
    is_near = mask.window is None or query - key < mask.window
    is_inside = mask.chunk is None or query // mask.chunk == key // mask.chunk
    return key <= query and is_near and is_inside
