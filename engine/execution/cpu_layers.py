"""The layers of a decoder of the Llama kind for few tokens on a CPU: products, and one kernel between any two of them.

Torch takes some microseconds for each of about forty operations of a layer, however little it computes; with few tokens
that is as long as the products take. Here a layer is its products, two more for attention, and five kernels
(`numba_layer.py`), over buffers that are kept. `lean.py`, whose plain operations are the oracle, decides where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from engine.cache.tensors import KVTensors
from engine.execution import numba_layer
from engine.execution.attention import AttentionMetadata
from engine.execution.fused_layer import close, made_up_rows
from engine.execution.groups import Group, attend_group
from engine.execution.products import Array, PackedLinear, array_of
from engine.execution.scaled import Kind

MOST_ROWS = 64
"""Of a pass: kernels run on one core, and products of more rows take longer than what is between them."""

_NONE = np.ones((1, 1), dtype=np.bool_)


class CpuLayer(NamedTuple):
    """Norms and products of one layer."""

    attention_norm: Array
    qkv: PackedLinear
    head_norms: tuple[Array, Array] | None
    """Of q and k, where the layer has them."""
    output: PackedLinear
    mlp_norm: Array
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class Sizes:
    """Sizes and constants of a decoder."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of its norms."""
    scaling: float
    """Of the scores of attention."""
    frequencies: Array
    """[D / 2] radians by which a position rotates queries and keys, float32."""
    rotation_scaling: float
    """Of the cosines and sines of a rotation."""


class _Memory:
    """What passes write between their products, for up to `MOST_ROWS` rows."""

    def __init__(self, hidden_dim: int, inner_dim: int, sizes: Sizes, dtype: torch.dtype) -> None:
        attended_dim = sizes.num_heads * sizes.head_dim
        widths = {"hidden": hidden_dim, "normed": hidden_dim, "query": attended_dim, "attended": attended_dim}
        self._flat = {
            name: torch.zeros(MOST_ROWS * width, dtype=dtype) for name, width in {**widths, "gated": inner_dim}.items()
        }
        self._rotation = np.zeros((2, MOST_ROWS, sizes.head_dim), dtype=np.float32)
        self._query_shape = (sizes.num_kv_heads, -1, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim)

    def buffers(self, num_rows: int) -> _Buffers:
        """Of a pass of so many rows, over the same memory."""
        of_rows = {name: flat[: len(flat) // MOST_ROWS * num_rows] for name, flat in self._flat.items()}
        query_KTGD = of_rows.pop("query").view(self._query_shape)
        tensors = {name: flat.view(num_rows, -1) for name, flat in of_rows.items()}
        arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
        return _Buffers(
            hidden=arrays["hidden"],
            normed_TD=tensors["normed"],
            normed=arrays["normed"],
            query_KTGD=query_KTGD,
            query=array_of(query_KTGD),
            attended_TX=tensors["attended"],
            attended=arrays["attended"],
            gated_TM=tensors["gated"],
            gated=arrays["gated"],
            cosines=self._rotation[0, :num_rows],
            sines=self._rotation[1, :num_rows],
        )


class _Buffers(NamedTuple):
    """What a pass of T rows writes: as tensors, and as the arrays over the same memory."""

    hidden: Array
    normed_TD: Tensor
    normed: Array
    query_KTGD: Tensor
    """Queries by K/V head: the G heads of one together."""
    query: Array
    attended_TX: Tensor
    attended: Array
    gated_TM: Tensor
    gated: Array
    cosines: Array
    sines: Array


class CpuLayers:
    """The layers of one model."""

    def __init__(self, embedding: Tensor, layers: Sequence[CpuLayer], last_norm: Tensor, sizes: Sizes) -> None:
        self._embedding, self._last_norm = array_of(embedding), array_of(last_norm)
        self._layers, self._sizes = layers, sizes
        memory = _Memory(embedding.shape[1], layers[0].down.shape[1], sizes, embedding.dtype)
        self._buffers = [memory.buffers(num_rows) for num_rows in range(1, MOST_ROWS + 1)]

    @staticmethod
    def takes(num_rows: int, metadata: AttentionMetadata) -> bool:
        """Whether this is a pass for them."""
        return 0 < num_rows <= MOST_ROWS and metadata.paged is None

    def hidden(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata) -> Tensor:
        """[T, D] normed hidden states behind the last layer; the next pass writes over them."""
        buffers, sizes = self._buffers[len(token_ids_T) - 1], self._sizes
        slots_T = metadata.slots_T
        slots = np.arange(slots_T.start, slots_T.stop) if isinstance(slots_T, slice) else slots_T.numpy()
        numba_layer.embed(
            *(token_ids_T.contiguous().numpy(), positions_T.numpy(), self._embedding),
            *(sizes.frequencies, sizes.rotation_scaling, buffers.hidden, buffers.cosines, buffers.sines),
        )
        product = buffers.hidden  # of no layer yet
        attention = _Attention(metadata, buffers, sizes)
        for number, layer in enumerate(self._layers):
            keys, values = metadata.storage.layers[number]
            self._add_and_norm(buffers, product, number > 0, layer.attention_norm)
            joined = layer.qkv.of_few(buffers.normed_TD, buffers.normed)
            query_norm, key_norm = layer.head_norms or (layer.attention_norm, layer.attention_norm)
            numba_layer.rotate_and_write(
                *(joined, buffers.cosines, buffers.sines, layer.head_norms is not None, query_norm, key_norm),
                *(sizes.eps, slots, array_of(keys), array_of(values), buffers.query),
            )
            attention.attend(number)
            self._add_and_norm(
                buffers, layer.output.of_few(buffers.attended_TX, buffers.attended), True, layer.mlp_norm
            )
            numba_layer.gate(layer.gate_up.of_few(buffers.normed_TD, buffers.normed), buffers.gated)
            product = layer.down.of_few(buffers.gated_TM, buffers.gated)
        self._add_and_norm(buffers, product, True, self._last_norm)
        return buffers.normed_TD

    def _add_and_norm(self, buffers: _Buffers, product: Array, has_product: bool, weight: Array) -> None:
        numba_layer.add_and_norm(buffers.hidden, product, has_product, weight, self._sizes.eps, buffers.normed)


class _Attention:
    """Attention of a pass, layer by layer: of buffers' queries to their attended rows."""

    def __init__(self, metadata: AttentionMetadata, buffers: _Buffers, sizes: Sizes) -> None:
        self._storage, self._groups = metadata.storage, metadata.groups
        self._buffers, self._sizes = buffers, sizes
        # Products of bfloat16 would round the scores.
        is_simple = buffers.query_KTGD.dtype == torch.float32 and all(map(_is_lone, metadata.groups))
        self._lone = [_Lone(group, buffers.query_KTGD, sizes.scaling) for group in metadata.groups] if is_simple else []

    def attend(self, layer: int) -> None:
        """Write what all queries give."""
        for lone in self._lone:
            lone.attend(self._storage, layer, self._buffers.attended)
        if not self._lone:
            query_1HTD = self._buffers.query_KTGD.transpose(1, 2).flatten(0, 1).unsqueeze(0)
            for group in self._groups:
                found = attend_group(group, self._storage, layer, query_1HTD, self._sizes.scaling, Kind(), None)
                self._buffers.attended_TX[group.real_rows] = found.flatten(1)


class _Lone:
    """One sequence of a pass: two products, and a kernel between them."""

    def __init__(self, group: Group, query_KTGD: Tensor, scaling: float) -> None:
        assert isinstance(group.rows, slice)
        num_keys = group.shape[2]
        self._query_KRD = query_KTGD[:, group.rows].flatten(1, 2)
        self._scores_KRN = query_KTGD.new_empty((*self._query_KRD.shape[:2], num_keys))
        self._scores = self._scores_KRN.numpy()
        self._visible = _NONE if group.visible is None else group.visible[0].numpy()
        self._slots, self._first, self._scaling = group.slots, group.rows.start, scaling

    def attend(self, storage: KVTensors, layer: int, result: Array) -> None:
        keys, values = storage.read(layer, self._slots)
        torch.bmm(self._query_KRD, keys.permute(1, 2, 0), out=self._scores_KRN)
        numba_layer.softmax(self._scores, self._scaling, self._visible is not _NONE, self._visible)
        numba_layer.merge(torch.bmm(self._scores_KRN, values.transpose(0, 1)).numpy(), self._first, result)


def _is_lone(group: Group) -> bool:
    return group.shape[0] == 1 and isinstance(group.rows, slice)


def find_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernels of layers; None where they give the plain operations' numbers."""
    made_up = partial(made_up_rows, device, dtype)
    hidden, product, weight = made_up(5, 96), made_up(5, 96).flip(0), made_up(96)
    normed, summed = torch.empty_like(hidden), hidden.clone()
    numba_layer.add_and_norm(*map(array_of, (summed, product)), True, array_of(weight), 1e-5, array_of(normed))
    if not close(normed, rms_norm(hidden + product, (96,), weight, 1e-5)):
        return "norms differ"
    gated = hidden.new_empty(5, 48)
    numba_layer.gate(array_of(hidden), array_of(gated))
    if not close(gated, silu(hidden[:, :48]) * hidden[:, 48:]):
        return "gates differ"
    return _embedding_fault(made_up) or _rotation_fault(made_up) or _attention_fault()


def _embedding_fault(made_up: Callable[..., Tensor]) -> str | None:
    embedding, frequencies = made_up(7, 12), torch.tensor([1.0, 0.1, 0.01])
    token_ids, positions = torch.tensor([6, 0, 3]), torch.tensor([0, 5, 900])
    hidden, rotation = embedding.new_empty(3, 12), torch.empty(2, 3, 6)
    numba_layer.embed(
        *(token_ids.numpy(), positions.numpy(), array_of(embedding), frequencies.numpy(), 1.5),
        *(array_of(hidden), *rotation.numpy()),
    )
    if not torch.equal(hidden, embedding[token_ids]):
        return "embeddings differ"
    angles = positions[:, None] * frequencies
    cosines, sines = ((1.5 * part).to(embedding.dtype).float() for part in (angles.cos(), angles.sin()))
    expected = torch.stack([torch.cat([cosines, cosines], 1), torch.cat([-sines, sines], 1)])
    # An angle's own rounding grows with the position.
    return None if torch.allclose(rotation, expected, atol=1e-4 + torch.finfo(embedding.dtype).eps) else "angles differ"


def _rotation_fault(made_up: Callable[..., Tensor]) -> str | None:
    num_heads, num_kv_heads, head_dim = 6, 2, 16
    joined, norms = made_up(5, (num_heads + 2 * num_kv_heads) * head_dim), made_up(2, head_dim)
    slots = torch.tensor([4, 0, 8, 2, 5])
    keys, values = (made_up(9, num_kv_heads, head_dim).zero_() for _ in range(2))
    query_KTGD = joined.new_empty(num_kv_heads, 5, num_heads // num_kv_heads, head_dim)
    cosines, sines = made_up(5, head_dim).float(), made_up(5, head_dim).float().flip(1)
    numba_layer.rotate_and_write(
        *(array_of(joined.clone()), cosines.numpy(), sines.numpy(), True, *map(array_of, norms), 1e-5),
        *(slots.numpy(), array_of(keys), array_of(values), array_of(query_KTGD)),
    )
    heads = joined.view(5, -1, head_dim)
    query = query_KTGD.transpose(0, 1).flatten(1, 2)
    for found, start, stop, norm in (
        (query, 0, num_heads, norms[0]),
        (keys[slots], num_heads, num_heads + num_kv_heads, norms[1]),
    ):
        own = rms_norm(heads[:, start:stop], (head_dim,), norm, 1e-5)
        turned = own * cosines[:, None] + own.roll(head_dim // 2, -1) * sines[:, None]
        if not close(found, turned.to(found.dtype)):
            return "rotations differ"
    return None if torch.equal(values[slots], heads[:, num_heads + num_kv_heads :]) else "values differ"


def _attention_fault() -> str | None:
    made_up = partial(made_up_rows, torch.device("cpu"), torch.float32)
    visible = torch.ones(3, 40, dtype=torch.bool).tril(30)
    scores, attended = made_up(2, 6, 40) * 9, made_up(2, 6, 16)
    expected = (scores * 0.3).masked_fill(~visible.repeat_interleave(2, 0), -torch.inf).softmax(-1)
    numba_layer.softmax(scores.numpy(), 0.3, True, visible.numpy())
    merged = torch.zeros(4, 64)
    numba_layer.merge(attended.numpy(), 1, merged.numpy())
    rows = attended.view(2, 3, 2, 16).transpose(0, 1).reshape(3, 64)
    return None if close(scores, expected) and torch.equal(merged[1:], rows) else "attention differs"
