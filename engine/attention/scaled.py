"""Scaled dot-product attention, with score softcapping and attention sinks for the models that have them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class ScoreOptions(NamedTuple):
    """Options of a layer's attention."""

    softcap: float | None = None
    sinks: Tensor | None = None
    """[H] One logit per head, which takes its share of the weights and has no value."""


def scaled_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, kind: ScoreOptions
) -> Tensor:
    """Attend: query (B, H, Q, D), key and value (B, H_kv, K, D) -> (B, H, Q, D_v).

    mask: is added to the scores. The query heads of a K/V head may be folded into further queries of one head
    (`groups.attend_group`); Q is then the queries of all these heads, head by head.
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
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
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
    column = sinks.repeat_interleave(scores.shape[2] // sinks.shape[1], 1)[None, :, :, None].expand(
        *scores.shape[:-1], 1
    )
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
