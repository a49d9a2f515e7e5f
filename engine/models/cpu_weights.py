"""Weights of the CPU's decoder: products in blocks, in the checkpoint's type or in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.numba_product import BLOCK, GROUP, WIDENS_HALVES

Array = npt.NDArray[Any]

_LINE = 64
"""Bytes of a cache line."""
_NO_SCALES = np.zeros((1, 1, 0, BLOCK), dtype=np.float32)


class Product:
    """The weights of one product in all L layers, in blocks [L, N / B, K, B] of one piece of memory."""

    def __init__(self, num_layers: int, num_columns: int, depth: int, dtype: torch.dtype, bits: int) -> None:
        self._dtype = dtype
        self._numbers, _ = stored_types(dtype, bits == 8, False)
        num_blocks = -(-num_columns // BLOCK)
        self.weights = aligned((num_layers, num_blocks, depth, BLOCK), self._numbers)
        self.bias = np.zeros((num_layers, num_blocks * BLOCK), dtype=np.float32)
        self.scales = _NO_SCALES.repeat(num_layers, 0)
        if bits == 8:
            self.scales = aligned((num_layers, num_blocks, -(-depth // GROUP), BLOCK), np.dtype(np.float32))

    @staticmethod
    def of(weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype, bits: int = 16) -> Product:
        """Lay out weights [N, K], one for each layer."""
        num_columns, depth = weights[0].shape
        product = Product(len(weights), num_columns, depth, dtype, bits)
        for layer, weight in enumerate(weights):
            product.put(layer, weight, bias)
        return product

    def put(self, layer: int, weight: Tensor, bias: Tensor | None, first: int = 0, step: int = 1) -> None:
        """Store the weight [N, K] of a layer in every `step`-th block from `first` on."""
        num_columns, depth = weight.shape
        num_blocks = -(-num_columns // BLOCK)
        weight = weight.detach().to(self._dtype)
        padded = torch.zeros((num_blocks * BLOCK, self.weights.shape[2]), dtype=weight.dtype)
        padded[:num_columns, :depth] = weight
        blocks = padded.view(num_blocks, BLOCK, -1).transpose(1, 2)
        places = slice(first, first + step * num_blocks, step)
        if self._numbers == np.int8:
            blocks, self.scales[layer, places] = quantised(blocks.float())
        self.weights[layer, places] = _bits(blocks, self._numbers)
        if bias is not None:
            of_blocks = self.bias[layer].reshape(-1, BLOCK)[places]
            flat = np.zeros(of_blocks.size, dtype=np.float32)
            flat[:num_columns] = bias.float().numpy()
            self.bias[layer].reshape(-1, BLOCK)[places] = flat.reshape(of_blocks.shape)

    @property
    def nbytes(self) -> int:
        """Return the memory of the weights."""
        return int(self.weights.nbytes + self.scales.nbytes + self.bias.nbytes)


def stored_types(dtype: torch.dtype, quantises: bool, rounds_kv: bool) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """(type of numpy for weights of a type, type for K/V): what the functions of a pass are compiled for."""
    stored = {torch.bfloat16: np.uint16, torch.float16: np.int16 if WIDENS_HALVES else np.float32}
    weights = np.int8 if quantises else stored.get(dtype, np.float32)
    return np.dtype(weights), np.dtype(np.uint16 if rounds_kv else np.float32)


def _bits(numbers: Tensor, stored: np.dtype[Any]) -> Array:
    if stored == np.float32:
        numbers = numbers.float()
    elif stored != np.int8:
        numbers = numbers.view(torch.int16)
    return numbers.numpy().view(stored)


def quantised(blocks: Tensor) -> tuple[Tensor, Array]:
    """Return ([blocks, K, B] in 8 bits, [blocks, groups, B] their scales)."""
    num_blocks, depth, width = blocks.shape
    num_groups = -(-depth // GROUP)
    padded = torch.zeros((num_blocks, num_groups * GROUP, width))
    padded[:, :depth] = blocks
    groups = padded.view(num_blocks, num_groups, GROUP, width)
    scales = groups.abs().amax(2) / 127
    shares = groups / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    return shares.round().to(torch.int8).view(num_blocks, -1, width)[:, :depth], scales.numpy()


def dequantised(weight: Tensor) -> Tensor:
    """Return the numbers that a weight [N, K] in 8 bits represents."""
    numbers, scales = quantised(weight.t().unsqueeze(0))
    of_numbers = torch.from_numpy(scales).repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return (numbers.float() * of_numbers)[0].t()


def aligned(shape: tuple[int, ...], numbers: np.dtype[Any]) -> Array:
    """Return memory that begins at a cache line, with a spare line at its end."""
    size = int(np.prod(shape)) * numbers.itemsize
    piece = np.zeros(size + 2 * _LINE, dtype=np.uint8)
    start = -piece.ctypes.data % _LINE
    found: Array = piece[start : start + size].view(numbers).reshape(shape)
    return found
