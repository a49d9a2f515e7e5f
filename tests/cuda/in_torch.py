"""Attention over pages in torch, from the kernel's operands, for tests of something else.

Triton's interpreter takes a hundred times as long. `test_attention_kernel.py` compares both.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from engine.attention.groups import ScoreOptions
from engine.attention.paged import Paged
from engine.attention.tensors import KVTensors
from engine.cuda import attention_kernel
from tests.engine.tiny import DEVICE
from tests.wrong import instead


def attend(
    paged: Paged,
    storage: KVTensors,
    layer: int,
    query: Tensor,
    scaling: float | None,
    kind: ScoreOptions,
    window: int | None,
) -> Tensor:
    """Return what `attend_paged` returns; rows of no sequence get 0."""
    keys, values = (part.to(query.dtype) for part in storage.layers[layer])
    groups = query.shape[1] // keys.shape[1]
    output = query.new_zeros(query.shape[2], query.shape[1], values.shape[2])
    bounds = torch.stack([paged.starts, paged.counts, paged.first_keys, paged.ends, paged.num_keys], 1).tolist()
    for number, (start, count, first_key, end, num_keys) in enumerate(bounds):
        assert count <= paged.most_queries or not paged.is_padded, "rows without a program"
        assert num_keys - first_key <= paged.most_keys, "keys without a program"
        rows, index = slice(start, start + count), torch.arange(first_key, num_keys)
        node, is_node = (index - end).clamp(min=0), index >= end
        bits = paged.words[rows][:, (node // 64).clamp(max=paged.words.shape[1] - 1)] >> node % 64 & 1
        seen = (index < paged.limits[rows, None]) | (is_node & (bits != 0))
        depths = paged.node_positions[number, node.clamp(max=paged.node_positions.shape[1] - 1)]
        position, key_position = paged.positions[rows, None], torch.where(is_node, depths, index)
        if window is not None:
            seen &= position - key_position < window
        if kind.chunk is not None:
            seen &= position // kind.chunk == key_position // kind.chunk
        slots = paged.pages[number, index // paged.page_size].long() * paged.page_size + index % paged.page_size
        key, value = (part[slots].repeat_interleave(groups, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[0].transpose(0, 1)[rows], key)
        scores = scores * (query.shape[3] ** -0.5 if scaling is None else scaling)
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if kind.sinks is not None:
            sinks = kind.sinks.to(scores.dtype)[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sinks], 2)
        weights = torch.where(seen.any(1)[:, None], scores.softmax(2), 0.0)[:, :, : len(index)]
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value)
    return output.unsqueeze(0)


def attention_in_torch() -> contextlib.AbstractContextManager[Any]:
    """Let passes over pages attend by `attend`, temporarily; on a device by the kernel."""
    if DEVICE.type != "cpu":
        return contextlib.nullcontext()
    return instead(attention_kernel, "attend_paged", lambda _, *operands: attend(*operands))
