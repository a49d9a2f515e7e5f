"""What a kernel needs to know of a flat pass to read every sequence's keys where they lie, in pages.

Keys of a sequence are numbered like its tokens: the text up to `ends`, then the nodes behind it. A query sees all keys
below its limit (a token of the text those before it and itself, a node the whole text), and of the nodes those whose
bit is set in its words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.inputs import PassInput

Integers = npt.NDArray[np.integer[Any]]

_WORD = 64


class PagedInput(NamedTuple):
    """R sequences of a pass of T tokens, on the host; 32-bit integers unless said."""

    words: Integers
    """[T, W] 64-bit words: which nodes a query sees."""
    pages: Integers
    """[R, P] block ids, padded with 0."""
    starts: Integers
    """[R] first row of the flat pass."""
    counts: Integers
    """[R] rows."""
    first_keys: Integers
    ends: Integers
    """[R] the keys seen at all begin with the first, and are nodes from `ends` on."""
    num_keys: Integers
    """[R] number after the last key."""
    node_positions: Integers
    """[R, N] positions of the nodes' keys."""
    limits: Integers
    """[T] a query sees the keys below."""
    positions: Integers
    """[T]"""


class Paged(NamedTuple):
    """The same on the device."""

    words: Tensor
    pages: Tensor
    starts: Tensor
    counts: Tensor
    first_keys: Tensor
    ends: Tensor
    num_keys: Tensor
    node_positions: Tensor
    limits: Tensor
    positions: Tensor
    page_size: int
    most_queries: int
    most_keys: int
    is_padded: bool = False
    """Whether every sequence has room for `most_queries` rows, of which it may use fewer."""

    @staticmethod
    def of(host: PagedInput, page_size: int, device: torch.device) -> Paged:
        """Move a pass to the device, in one copy."""
        flat = _moved(_packed(host), device)
        most_keys = int((host.num_keys - host.first_keys).max(initial=0))
        pieces = torch.split(flat, [_room(array) for array in host])
        words = pieces[0][: host.words.nbytes // 4].view(torch.int64).view(host.words.shape)
        others = (piece[: array.size].view(array.shape) for piece, array in zip(pieces[1:], host[1:], strict=True))
        pages, starts, counts, first_keys, ends, num_keys, node_positions, limits, positions = others
        return Paged(
            *(words, pages, starts, counts, first_keys, ends, num_keys, node_positions, limits, positions),
            *(page_size, int(host.counts.max(initial=0)), most_keys),
        )


def _room(array: Integers) -> int:
    """Numbers of 32 bits that a part takes of the array: each begins at 16 bytes, as Triton compiles a kernel anew for
    pointers that do and pointers that do not."""
    return -(-array.nbytes // 16) * 4


def _packed(host: PagedInput) -> npt.NDArray[np.int32]:
    """All of it in one array."""
    result = np.zeros(sum(map(_room, host)), dtype=np.int32)
    start = 0
    for array in host:
        own = array.reshape(-1).view(np.int32)
        result[start : start + len(own)] = own
        start += _room(array)
    return result


def _moved(values: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """A host array as a tensor on `device`, through pinned memory: so the copy is not waited for."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def pages_of(batch: PassInput) -> PagedInput:
    """The pages and masks of all sequences of a pass."""
    nodes = [sequence.nodes for sequence in batch.sequences]
    depths = [np.array([*of_one.cached_depths, *of_one.depths], dtype=np.int32) for of_one in nodes]
    most_nodes = max(1, *map(len, depths))
    num_words = -(-most_nodes // _WORD)
    node_positions = np.zeros((len(nodes), most_nodes), dtype=np.int32)
    limits = (batch.positions_T + 1).astype(np.int32)
    bits = np.zeros((len(limits), num_words * _WORD), dtype=np.bool_)
    for number, own in enumerate(depths):
        if len(own):
            end, start = batch.end_B[number], batch.start_B[number]
            middle, stop = start + batch.num_inputs_B[number], start + batch.num_rows_B[number]
            node_positions[number, : len(own)] = end - 1 + own
            limits[middle:stop] = end
            bits[middle:stop, : len(own)] = nodes[number].ancestry
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int64)
    pages, starts, counts, first_keys, ends, num_keys, positions = (
        values.astype(np.int32)
        for values in (
            *(batch.blocks_BP, batch.start_B, batch.num_rows_B, batch.first_key_B, batch.end_B, batch.num_keys_B),
            batch.positions_T,
        )
    )
    return PagedInput(words, pages, starts, counts, first_keys, ends, num_keys, node_positions, limits, positions)
