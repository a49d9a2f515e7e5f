"""Attention of a device at the shapes of Qwen3-8B, compared with plain operations and timed, for
`gpu_kernels.py`.

Texts lie in pages of 16 tokens in arbitrary order. Single tokens and trees are read as recorded
steps read them, with room for the longest text; prompts as eager steps do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.groups import ScoreOptions
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, build
from engine.attention.paged import Paged, upload
from engine.attention.tensors import KVShape, KVTensors
from engine.speculation.topology import drawn_tree
from research.analysis.gpu_groups import KernelGroup, device_us, error_of, rotations

_PAGE = 16
_MOST_KEYS = 40_960
"""Longest text of Qwen3-8B."""
_CHECKED_SEQUENCES, _CHECKED_ROWS = 2, 64
_TREE = (4, 1, 1, 1, 1)
"""Children of every node by depth: four chains of five tokens."""


class Text(NamedTuple):
    """One sequence of a pass."""

    before: int
    """Tokens whose K/V is stored."""
    num_tokens: int
    """Tokens of the text that the pass computes."""
    num_nodes: int = 0
    """Drafted tokens after them, as `_TREE` lays them out."""

    @property
    def num_rows(self) -> int:
        """Return the number of its rows of the pass."""
        return self.num_tokens + self.num_nodes

    @property
    def num_keys(self) -> int:
        """Return the number of its keys."""
        return self.before + self.num_tokens + self.num_nodes


class AttentionPass(NamedTuple):
    """Operands of attention."""

    texts: Sequence[Text]
    blocks: Sequence[list[int]]
    storage: KVTensors
    query: Tensor
    paged: Paged


def is_seen(text: Text) -> Tensor:
    """Return [rows, keys] whether each row of a text's pass sees each key."""
    row = torch.arange(text.num_rows)[:, None]
    seen = torch.arange(text.num_keys)[None] <= text.before + row
    if text.num_nodes:
        end = text.before + text.num_tokens
        seen[text.num_tokens :, end:] = torch.tensor(drawn_tree(_TREE).ancestry())
    return seen


def make_pass(group: KernelGroup, texts: Sequence[Text], as_recorded: bool) -> AttentionPass:
    """Return a pass over random keys, values and queries."""
    num_heads, num_kv_heads, dim = (32, 8, 128) if group.on_cuda else (4, 2, 32)
    counts = [-(-text.num_keys // _PAGE) for text in texts]
    order = random.Random(1).sample(range(sum(counts)), sum(counts))
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    tree = drawn_tree(_TREE)
    nodes = NodeInput([1] * len(tree.depths), tree.depths, (), tree.ancestry())
    parts = [
        SequenceInput([1] * text.num_tokens, text.before, own, nodes if text.num_nodes else NO_NODES, slice(0))
        for text, own in zip(texts, blocks, strict=True)
    ]
    layout = build(parts, _PAGE)
    paged = upload([layout], _PAGE, group.device)[0].paged
    assert paged is not None
    if as_recorded:
        paged = paged._replace(most_keys=_MOST_KEYS if group.on_cuda else paged.most_keys, is_padded=True)
    shape = KVShape.equal(1, num_kv_heads, dim, dim)
    num_slots = sum(counts) * _PAGE
    num_layers = rotations(num_slots * shape.layer_bytes(group.dtype))
    storage = KVTensors(KVShape.equal(num_layers, num_kv_heads, dim, dim), num_slots, group.dtype, group.device)
    storage.keys.normal_()
    storage.values.normal_()
    # Scores differ so much that few keys have most of the weight: one that is left out shows.
    query = 2 * group.randn(len(layout.positions_T), num_heads, dim, dtype=torch.float32)
    return AttentionPass(texts, blocks, storage, query.to(group.dtype).transpose(0, 1).unsqueeze(0), paged)


def plain(one: AttentionPass, number: int, rows: slice) -> Tensor:
    """Return [rows, H, D] the attention of some rows of a text, in float32."""
    text, device = one.texts[number], one.query.device
    start = sum(before.num_rows for before in one.texts[:number])
    index = torch.arange(text.num_keys)
    slots = (torch.tensor(one.blocks[number])[index // _PAGE] * _PAGE + index % _PAGE).to(device)
    keys, values = (kept[0][slots].float().transpose(0, 1) for kept in (one.storage.keys, one.storage.values))
    query = one.query[0, :, start : start + text.num_rows][:, rows].float()
    groups = len(query) // len(keys)
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = query @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~is_seen(text)[rows].to(device), -torch.inf).softmax(-1)
    result: Tensor = (weights @ values).transpose(0, 1)
    return result


def error_of_pass(one: AttentionPass, found: Tensor) -> float:
    """Return the largest error of the first and the last texts' last rows; found: [T, H, D]."""
    errors = []
    starts = np.cumsum([0, *(text.num_rows for text in one.texts)]).tolist()
    for number in {*range(_CHECKED_SEQUENCES), len(one.texts) - 1} & set(range(len(one.texts))):
        count = starts[number + 1] - starts[number]
        rows = slice(max(0, count - _CHECKED_ROWS), count)
        errors.append(error_of(found[starts[number] : starts[number + 1]][rows], plain(one, number, rows)))
    return max(errors) if not any(np.isnan(errors)) else float("nan")


def attend(one: AttentionPass, layer: int) -> Tensor:
    """Return [T, H, D] the attention by the kernel."""
    from engine.cuda import attention_kernel  # the environment decides how Triton runs

    return attention_kernel.attend_paged(one.paged, one.storage, layer, one.query, None, ScoreOptions(), None)[0]


def measured(group: KernelGroup, name: str, texts: Sequence[Text], as_recorded: bool = True) -> None:
    """Compare and time the attention of a pass."""

    def work() -> None:
        one = make_pass(group, texts, as_recorded)
        shape = one.storage.keys.shape
        token_bytes = 2 * shape[2] * shape[3] * group.dtype.itemsize
        scores = sum(text.num_rows * (text.before + text.num_tokens / 2) for text in texts)
        operations = 4 * scores * one.query.shape[1] * one.query.shape[3]
        runs = [partial(attend, one, layer) for layer in range(shape[0])]
        num_bytes = sum(text.num_keys for text in texts) * token_bytes
        error = error_of_pass(one, runs[0]())
        group.kernel(f"attention, {name}", runs, num_bytes, error, operations=operations)

    group.case(name, work)


def tokens(group: KernelGroup) -> None:
    """Measure single tokens after short and long texts."""
    if not group.on_cuda:
        measured(group, "2 tokens after 50", [Text(50, 1)] * 2)
        return
    for count in (1, 4, 16, 64):
        for before in (300, 1000, 8000, 32_000):
            if count * before <= 200_000:
                measured(group, f"{count} tokens after {before}", [Text(before, 1)] * count)
    measured(group, "1 token after 32000, 31 after 300", [Text(32_000, 1)] + [Text(300, 1)] * 31)


def trees(group: KernelGroup) -> None:
    """Measure trees of four chains of five tokens."""
    cases = ((1, 300), (1, 8000), (4, 1000), (12, 1000)) if group.on_cuda else ((2, 30),)
    for count, before in cases:
        measured(group, f"{count} trees 4x5 after {before}", [Text(before, 1, 20)] * count)


def prompts(group: KernelGroup) -> None:
    """Measure parts of prompts, alone and with single tokens."""
    if not group.on_cuda:
        measured(group, "40 of a prompt after 20, 3 tokens after 50", [Text(20, 40)] + [Text(50, 1)] * 3, False)
        return
    for before in (0, 2000, 8000, 30_000):
        measured(group, f"2048 of a prompt after {before}", [Text(before, 2048)], False)
    for count in (512, 2048):
        texts = [Text(0, count)] + [Text(1000, 1)] * 63
        measured(group, f"{count} of a prompt, 63 tokens after 1000", texts, False)
    query, keys = (group.randn(1, heads, 2048, 128) for heads in (32, 8))
    work = partial(scaled_dot_product_attention, query, keys, keys, is_causal=True, enable_gqa=True)
    group.add("torch's attention, 2048 of a prompt", {"us": device_us([work], group.device)})
