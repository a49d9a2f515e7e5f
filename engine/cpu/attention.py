"""Attention on a CPU, for models that run in transformers' code.

The compiled attention of the decoder (`compiled/attention_loops.py`) reads K and V in their pages.
It reads latents (MLA) between the products of each head (`compiled/head_products.py`). A row's bits
do not depend on other rows, and are the same for a drafted token and the text's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention.groups import ScoreOptions
from engine.attention.latent import head_weights
from engine.attention.paged import Paged
from engine.attention.tensors import KVTensors
from engine.cpu.call import TableCall
from engine.cpu.compiled import head_products, model_pass, pass_table
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.decoder import array_of, parts_of
from engine.cpu.weights import Array
from engine.errors import LoadError

_QUERIES_TOGETHER = 256
"""Most queries of a part, which are rows by heads; results do not depend on it."""
_KV_TYPES: Mapping[torch.dtype, Any] = {torch.float32: np.float32, torch.bfloat16: np.uint16}


class _HeadWeights(NamedTuple):
    """Weights of a module's heads, in blocks [H, N / B, K, B]."""

    keys: Array
    """K is the width of a key without rotation, N that of a latent."""
    values: Array
    """K is the width of a latent, N that of a value."""
    value_dim: int


class CpuAttention:
    """Attends for all sequences of a pass, with the products of heads before and after."""

    def __init__(self) -> None:
        self._weights: dict[Any, _HeadWeights] = {}
        self._products = TableCall(head_products.work().address, head_products.COUNTERS)
        self._attention = TableCall(0, pass_table.COUNTERS)
        self._pass: tuple[Paged, int, int] | None = None
        """Pass whose arrays are put, and its numbers of query heads and of K/V heads."""

    @property
    def weight_bytes(self) -> int:
        """Return the memory of the weights in blocks."""
        return sum(weights.keys.nbytes + weights.values.nbytes for weights in self._weights.values())

    def absorbed(self, module: Any, query: Tensor) -> Tensor:
        """Do the work of `latent.absorbed`."""
        weights = self._weights_of(module)
        num_added = module.kv_lora_rank - module.qk_nope_head_dim
        return self._multiply(query[0].transpose(0, 1), weights.keys, query.shape[-1] + num_added).transpose(1, 2)

    def expanded(self, module: Any, output: Tensor) -> Tensor:
        """Do the work of `latent.expanded`."""
        weights = self._weights_of(module)
        return self._multiply(output[0], weights.values, weights.value_dim)

    def attend_paged(
        self,
        paged: Paged,
        storage: KVTensors,
        layer: int,
        query: Tensor,
        scaling: float | None,
        kind: ScoreOptions,
        window: int | None,
    ) -> Tensor:
        """Do the work of `PagedKernel.attend_paged`."""
        keys, values = storage.layers[layer]
        if keys.dtype not in _KV_TYPES or kind != ScoreOptions():
            raise LoadError("the compiled attention has no such scores or numbers")
        _, num_heads, num_rows, width = query.shape
        num_kv_heads = keys.shape[1]
        call = self._attention
        call.function = _attention_of(keys.dtype)
        if self._pass is None or self._pass[0] is not paged or self._pass[1:] != (num_heads, num_kv_heads):
            self._put_pass(paged, num_heads, num_kv_heads)
        output = torch.empty(1, num_rows, num_heads, values.shape[-1])
        stored_values = keys if layer in storage.latent else values
        call.put(pass_table.KEYS, array_of(keys)[None])
        call.put(pass_table.VALUES, array_of(stored_values)[None])
        call.put(pass_table.JOINED, _rows(query[0].transpose(0, 1)))
        call.put(pass_table.ATTENDED, _rows(output[0]))
        call.put(pass_table.CONSTANTS, np.array([0, scaling or width**-0.5], dtype=np.float32))
        call.put(pass_table.WINDOWS, np.array([window or 0]))
        call.run()
        return output.to(query.dtype)

    def _put_pass(self, paged: Paged, num_heads: int, num_kv_heads: int) -> None:
        """Put the arrays of a pass, which its layers share."""
        self._pass = paged, num_heads, num_kv_heads
        num_shared = num_heads // num_kv_heads
        call = self._attention
        rows_together = _rows_together(paged.most_queries, num_shared)
        parts = parts_of(paged.starts.numpy(), paged.counts.numpy(), rows_together)
        sizes = [
            paged.page_size,
            torch.get_num_threads(),
            num_heads,
            _heads_together(num_shared, len(parts) * num_kv_heads),
        ]
        call.put(pass_table.SIZES, np.array(sizes))
        call.put(pass_table.PARTS, parts)
        call.put(pass_table.VISIBLE_FIELDS, np.array([pass_table.VISIBLE_BITS]))
        call.put(pass_table.VISIBLE_BITS, paged.words.numpy())
        call.put(pass_table.PAGES, paged.pages.numpy())
        call.put(pass_table.FIRST_KEYS, paged.first_keys.numpy())
        call.put(pass_table.ENDS, paged.ends.numpy())
        call.put(pass_table.NUM_KEYS, paged.num_keys.numpy())
        call.put(pass_table.NODE_POSITIONS, paged.node_positions.numpy())
        call.put(pass_table.LIMITS, paged.limits.numpy())
        call.put(pass_table.POSITIONS, paged.positions.numpy().astype(np.int64))

    def _multiply(self, rows_THK: Tensor, weights: Array, width: int) -> Tensor:
        """Return [1, T, H, width] products of each head's rows."""
        num_rows, num_heads, _ = rows_THK.shape
        result = torch.empty(1, num_rows, num_heads, width)
        self._products.put(head_products.ROWS, _rows(rows_THK))
        self._products.put(head_products.WEIGHTS, weights)
        self._products.put(head_products.RESULT, _rows(result[0]))
        self._products.run()
        return result.to(rows_THK.dtype)

    def _weights_of(self, module: Any) -> _HeadWeights:
        weights = self._weights.get(module)
        if weights is None:
            keys_HDL, values_HDL = head_weights(module)
            blocks = _in_blocks(keys_HDL.transpose(1, 2)), _in_blocks(values_HDL)
            weights = self._weights[module] = _HeadWeights(*blocks, values_HDL.shape[1])
        return weights


@cache
def _attention_of(dtype: torch.dtype) -> int:
    """Return the address of the decoder's attention phase; phase and layer are 0."""
    address: int = model_pass.functions_of_kv(_KV_TYPES[dtype])[2].address
    return address


def _rows_together(most_rows: int, num_heads: int) -> int:
    """Return the most rows of a part, so that the longest sequence has parts of about one size.

    num_heads: query heads of a K/V head.
    """
    num_parts = -(-most_rows * num_heads // _QUERIES_TOGETHER)
    return -(-most_rows // num_parts)


def _heads_together(num_heads: int, num_parts: int) -> int:
    """Return the query heads of a part: every core has a part if there are enough heads.

    num_heads: query heads of a K/V head; num_parts: of all rows and K/V heads.
    """
    least_slices = min(num_heads, -(-torch.get_num_threads() // num_parts))
    return next(num_heads // count for count in range(least_slices, num_heads + 1) if num_heads % count == 0)


def _rows(numbers_THD: Tensor) -> Array:
    """Return [T, H * D] float32 numbers, without a copy if they are that already."""
    array: Array = numbers_THD.float().contiguous().flatten(1).numpy()
    return array


def _in_blocks(weight_HNK: Tensor) -> Array:
    """Return weights as [H, N / B, K, B] float32 blocks of columns."""
    num_heads, num_columns, depth = weight_HNK.shape
    padded = pad(weight_HNK.float(), (0, 0, 0, -num_columns % BLOCK))
    array: Array = padded.view(num_heads, -1, BLOCK, depth).transpose(2, 3).contiguous().numpy()
    return array
