"""K/V tensors of one model, addressed by slot.

In all layers slot = block * block_size + offset. Backends write K/V of all tokens and nodes; after
a step this module moves the accepted path's K/V behind the text.

A *tap* is a place whose hidden states a drafter reads: tap k is the stream that enters layer k, tap
N the stream that leaves the last of N layers, and `NORMED` that stream after the final norm.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels.protocol import KVMoves
from engine.kernels.torch_kernels import TORCH, Kernels

NORMED = -1


def slot_moves(pairs: Sequence[tuple[int, int]], block_ids: Sequence[int], block_size: int) -> KVMoves:
    """Return the moves of a sequence from index to index, as slots, without moves in place."""

    def slot(index: int) -> int:
        return block_ids[index // block_size] * block_size + index % block_size

    return [(slot(source), slot(to)) for source, to in pairs if source != to]


@dataclass(frozen=True)
class KVShape:
    """Shape of one token's K and V in every layer."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    hidden_dim: int = 0
    """Width of a hidden state; 0 if no drafter reads any."""
    taps: tuple[int, ...] = ()
    """Taps whose hidden states are stored with K and V."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        return self.num_layers * self.layer_bytes(dtype) + self.all_hidden_dim * dtype.itemsize

    @property
    def all_hidden_dim(self) -> int:
        """Return the width of the states of all taps together."""
        return len(self.taps) * self.hidden_dim

    def layer_bytes(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class KVTensors:
    """K/V and hidden states of all slots.

    Keys [layers, slots, heads, key_dim], values [layers, slots, heads, value_dim], hidden states
    [slots, taps * D]. `hidden` is None if there are no taps.
    """

    def __init__(
        self,
        shape: KVShape,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = TORCH,
    ) -> None:
        layout = (num_slots, shape.num_kv_heads)
        if shape.key_dim == shape.value_dim:
            # One piece of memory, so that one operation moves both.
            both = _zeros((2 * shape.num_layers, *layout, shape.key_dim), dtype, device)
            self.keys, self.values = both.chunk(2)
            self._moved = [both]
        else:
            self.keys = _zeros((shape.num_layers, *layout, shape.key_dim), dtype, device)
            self.values = _zeros((shape.num_layers, *layout, shape.value_dim), dtype, device)
            self._moved = [self.keys, self.values]
        self.layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        """(keys, values) of each layer, as views."""
        self.taps = shape.taps
        width = shape.all_hidden_dim
        self.hidden = _zeros((num_slots, width), dtype, device) if width else None
        if self.hidden is not None:
            self._moved.append(self.hidden[None, :, None])
        self._gathered = (self.keys.new_empty(0), self.values.new_empty(0))
        self.kernels = kernels

    def read(self, layer: int, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer at `slots` [slots, heads, dim].

        The next call uses the same memory.
        """
        keys, values = self.layers[layer]
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        count = len(slots)
        if len(self._gathered[0]) < count:
            self._gathered = (
                keys.new_empty((count, *keys.shape[1:])),
                values.new_empty((count, *values.shape[1:])),
            )
        gathered_keys = self._gathered[0][:count]
        gathered_values = self._gathered[1][:count]
        torch.index_select(keys, 0, slots, out=gathered_keys)
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
        self.keys[:, slots] = 0
        self.values[:, slots] = 0
        if self.hidden is not None:
            self.hidden[slots] = 0

    def keep(self, moves: Sequence[KVMoves]) -> None:
        """Move K/V and hidden states of tokens, by sequence.

        All tokens of a sequence are read before any is written. No two sequences share a slot.
        """
        nonempty = [sequence_moves for sequence_moves in moves if sequence_moves]
        if nonempty:
            self.kernels.move(self._moved, nonempty)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros.

    On a CPU they take memory only if they are written to. `torch.zeros` would write everywhere.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
