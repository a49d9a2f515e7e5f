"""K/V tensors of one model, addressed by slot.

In all layers slot = block * block_size + offset. Backends write K/V of all tokens and nodes; after
a step this module moves the accepted path's K/V behind the text.

A *tap* is a place whose hidden states a drafter reads: tap k is the stream that enters layer k, tap
N the stream that leaves the last of N layers, and `NORMED` that stream after the final norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.attention.states import FEW_STATES, CallShape, States, StateSizes
from engine.attention.zeros import zeros
from engine.kernels.protocol import KVMoves
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.plan import StatePlaces

NORMED = -1


def slot_moves(pairs: Sequence[tuple[int, int]], block_ids: Sequence[int], block_size: int) -> KVMoves:
    """Return the moves of a sequence from index to index, as slots, without moves in place."""

    def slot(index: int) -> int:
        return block_ids[index // block_size] * block_size + index % block_size

    return [(slot(source), slot(to)) for source, to in pairs if source != to]


def node_moves(pairs: Sequence[tuple[int, int]], end: int, places: StatePlaces | None) -> list[tuple[int, int, int]]:
    """Return the moves of a sequence's nodes for `States.keep`; end: index of its first node."""
    if places is None:
        return []
    return [(places.seat, source - end, to - end) for source, to in pairs if source != to]


class LayerShape(NamedTuple):
    """Shape of one token's K and V in a layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False
    """Whether V is the beginning of K (`latent.py`), so that K alone is stored."""

    @property
    def dim(self) -> int:
        """Return the stored numbers of a token."""
        if self.is_latent:
            return self.num_kv_heads * self.key_dim
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class KVShape:
    """Shapes of one token's K and V in all layers."""

    layers: Mapping[int, LayerShape]
    """Shape by layer; none for a layer without attention, or that reads another layer's K/V."""
    shared: Mapping[int, int] = field(default_factory=dict)
    """Layer whose K/V another one reads, by the reading layer."""
    hidden_dim: int = 0
    """Width of a hidden state; 0 if no drafter reads any."""
    taps: tuple[int, ...] = ()
    """Taps whose hidden states are stored with K and V."""
    calls: tuple[CallShape, ...] = ()
    """Calls of recurrent layers, in order."""
    are_scores_plain: bool = True
    """Whether no layer has a softcap, sinks or chunks."""

    @classmethod
    def equal(cls, num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int) -> KVShape:
        """Return the shape of a model whose layers are alike."""
        return cls(dict.fromkeys(range(num_layers), LayerShape(num_kv_heads, key_dim, value_dim)))

    def token_bytes(self, dtype: torch.dtype) -> int:
        num_stored = sum(layer.dim for layer in self.layers.values())
        return (num_stored + self.all_hidden_dim) * dtype.itemsize

    def input_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a node's inputs of recurrent layers."""
        return sum(call.input_bytes(dtype) for call in self.calls)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a text's state in recurrent layers."""
        return sum(call.state_bytes(dtype) for call in self.calls)

    @property
    def all_hidden_dim(self) -> int:
        """Return the width of the states of all taps together."""
        return len(self.taps) * self.hidden_dim

    def layer_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token's K and V in the largest layer."""
        return max((layer.dim for layer in self.layers.values()), default=0) * dtype.itemsize


class KVTensors:
    """K/V and hidden states of all slots.

    The layers of a shape lie in one tensor: keys [layers, slots, heads, key_dim], values
    [layers, slots, heads, value_dim]. Hidden states are [slots, taps * D]; `hidden` is None if
    there are no taps.
    """

    def __init__(
        self,
        shape: KVShape,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = TORCH,
        sizes: StateSizes = FEW_STATES,
    ) -> None:
        self.states = States(shape.calls, sizes, dtype, device)
        self.num_slots = num_slots
        self.shared = shape.shared
        self.latent = frozenset(number for number, layer in shape.layers.items() if layer.is_latent)
        """Layers whose values are views of their keys."""
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """(keys, values) of each layer, as views."""
        self._moved: list[torch.Tensor] = []
        self._stacked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gathered: dict[tuple[torch.Size, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {}
        for layer_shape in dict.fromkeys(shape.layers.values()):
            numbers = [number for number, other in shape.layers.items() if other == layer_shape]
            stacked = self._allocate(layer_shape, len(numbers), dtype, device)
            self._stacked.append(stacked)
            self.layers.update(zip(numbers, zip(*stacked, strict=True), strict=True))
        self.layers.update({reader: self.layers[source] for reader, source in shape.shared.items()})
        self.taps = shape.taps
        width = shape.all_hidden_dim
        self.hidden = zeros((num_slots, width), dtype, device) if width else None
        if self.hidden is not None:
            self._moved.append(self.hidden[None, :, None])
        self.kernels = kernels

    def _allocate(
        self, shape: LayerShape, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the layers of a shape."""
        layout = (self.num_slots, shape.num_kv_heads)
        if shape.is_latent:
            latents = zeros((num_layers, *layout, shape.key_dim), dtype, device)
            self._moved.append(latents)
            return latents, latents[..., : shape.value_dim]
        if shape.key_dim == shape.value_dim:
            # One piece of memory, so that one operation moves both.
            both = zeros((2 * num_layers, *layout, shape.key_dim), dtype, device)
            self._moved.append(both)
            keys, values = both.chunk(2)
            return keys, values
        keys = zeros((num_layers, *layout, shape.key_dim), dtype, device)
        values = zeros((num_layers, *layout, shape.value_dim), dtype, device)
        self._moved += [keys, values]
        return keys, values

    @property
    def keys(self) -> torch.Tensor:
        """Return the keys [layers, slots, heads, dim] of a model whose layers are alike."""
        ((keys, _),) = self._stacked
        return keys

    @property
    def values(self) -> torch.Tensor:
        """Return the values [layers, slots, heads, dim] of a model whose layers are alike."""
        ((_, values),) = self._stacked
        return values

    def read(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer at `slots` [slots, heads, dim].

        The next call uses the same memory.
        """
        keys, values = self.layers[layer]
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        count = len(slots)
        kind = keys.shape[1:], values.shape[1:]
        buffers = self._gathered.get(kind)
        if buffers is None or len(buffers[0]) < count:
            buffers = keys.new_empty((count, *kind[0])), values.new_empty((count, *kind[1]))
            self._gathered[kind] = buffers
        gathered_keys = buffers[0][:count]
        gathered_values = buffers[1][:count]
        torch.index_select(keys, 0, slots, out=gathered_keys)
        if layer in self.latent:
            return gathered_keys, gathered_keys[..., : values.shape[-1]]
        torch.index_select(values, 0, slots, out=gathered_values)
        return gathered_keys, gathered_values

    def store(self, tap: int, slots: torch.Tensor | slice, state_TD: torch.Tensor) -> None:
        """Write the hidden states of a pass to its slots, if the tap is stored."""
        if tap in self.taps:
            assert self.hidden is not None
            width = state_TD.shape[-1]
            place = self.taps.index(tap)
            self.hidden[slots, place * width : (place + 1) * width] = state_TD

    def wipe(self, slots: torch.Tensor) -> None:
        """Set the K/V and hidden states of tokens to zero."""
        for stored in self._moved:
            stored[:, slots] = 0

    def keep(self, moves: Sequence[KVMoves]) -> None:
        """Move K/V and hidden states of tokens, by sequence.

        All tokens of a sequence are read before any is written. No two sequences share a slot.
        """
        nonempty = [sequence_moves for sequence_moves in moves if sequence_moves]
        if nonempty and self._moved:
            self.kernels.move(self._moved, nonempty)
