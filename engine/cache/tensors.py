"""The K/V tensors of one model, addressed by slot.

All layers share one addressing: slot = block * block_size + offset. Writing happens in the
attention hook; here the accepted path of a step is made contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class KVShape:
    """Shape of one token's K and V in every layer."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's K and V over all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class KVTensors:
    """Keys [layers, slots, heads, key_dim] and values [layers, slots, heads, value_dim]."""

    def __init__(self, shape: KVShape, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        layout = (shape.num_layers, num_slots, shape.num_kv_heads)
        self.keys = torch.zeros((*layout, shape.key_dim), dtype=dtype, device=device)
        self.values = torch.zeros((*layout, shape.value_dim), dtype=dtype, device=device)
        self._gathered = (self.keys.new_empty(0), self.values.new_empty(0))

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer at `slots`, [slots, heads, dim]: valid until the next call, which uses the same memory."""
        count = len(slots)
        if len(self._gathered[0]) < count:
            keys, values = self.keys, self.values
            self._gathered = (keys.new_empty((count, *keys.shape[2:])), values.new_empty((count, *values.shape[2:])))
        keys, values = self._gathered[0][:count], self._gathered[1][:count]
        torch.index_select(self.keys[layer], 0, slots, out=keys)
        torch.index_select(self.values[layer], 0, slots, out=values)
        return keys, values

    def keep(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy slots (from, to), all read before any is written."""
        if not moves:
            return
        pairs = torch.tensor(moves, device=self.keys.device)
        source, destination = pairs[:, 0], pairs[:, 1]
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]


def slots_of(block_ids: Sequence[int], block_size: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Slots of the tokens at indices [start, stop) of a sequence that holds `block_ids`."""
    index = np.arange(start, stop, dtype=np.int64)
    blocks = np.asarray(block_ids, dtype=np.int64)
    slots: npt.NDArray[np.int64] = blocks[index // block_size] * block_size + index % block_size
    return slots
