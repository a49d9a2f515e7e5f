"""Layouts of passes on a device, where one kernel reads every sequence's keys in their pages.

A query sees all keys of the text below its limit, and the nodes whose bit is set in its words (`inputs.StepLayout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.inputs import StepLayout


class Paged(NamedTuple):
    """Operands of the attention kernel; 32-bit integers, as in `StepLayout`."""

    words: Tensor
    """[T, W] 64-bit words."""
    pages: Tensor
    starts: Tensor
    counts: Tensor
    first_keys: Tensor
    ends: Tensor
    num_keys: Tensor
    node_positions: Tensor
    limits: Tensor
    positions: Tensor
    """[T]"""
    page_size: int
    most_queries: int
    most_keys: int
    total_keys: int = 0
    """Keys of all texts; of a recorded step, whose texts grow, 0."""
    num_scores: int = 0
    """Pairs of a query and a key of its text; of a recorded step 0."""
    is_padded: bool = False
    """Whether every sequence has room for `most_queries` rows; it may use fewer."""


class DevicePass(NamedTuple):
    """A pass on the device."""

    token_ids_T: Tensor
    drawn_M: Tensor
    positions_T: Tensor
    slots_T: Tensor
    wanted_N: Tensor
    paged: Paged | None


def on_host(one: StepLayout) -> DevicePass:
    """Return a pass whose model runs on the host, without a copy."""
    numbers = one.token_ids_T, one.drawn_M, one.positions_T, one.slots_T, one.wanted_N
    token_ids_T, drawn_M, positions_T, slots_T, wanted_N = map(torch.from_numpy, numbers)
    return DevicePass(token_ids_T, drawn_M, positions_T, slots_T, wanted_N, None)


def upload(passes: Sequence[StepLayout], page_size: int, device: torch.device) -> list[DevicePass]:
    """Copy the layouts of a step's passes to the device, all in one copy that is not waited for."""
    arrays = [array for one in passes for array in _arrays(one)]
    flat = np.zeros(sum(map(_room, arrays)), dtype=np.int64)
    start = 0
    for array in arrays:
        flat[start : start + _room(array)].view(array.dtype)[: array.size] = array.reshape(-1)
        start += _room(array)
    whole = torch.from_numpy(flat)
    if device.type != "cpu":
        whole = whole.pin_memory().to(device, non_blocking=True)
    pieces = torch.split(whole, [_room(array) for array in arrays])
    tensors = (
        piece.view(getattr(torch, array.dtype.name))[: array.size].view(array.shape)
        for piece, array in zip(pieces, arrays, strict=True)
    )
    uploaded = []
    for one in passes:
        token_ids_T, drawn_M, positions_T, slots_T, wanted_N, *operands = (next(tensors) for _ in range(15))
        words, pages, starts, counts, first_keys, ends, num_keys, node_positions, limits, positions = operands
        keys_B = (one.num_keys - one.first_keys).astype(np.int64)
        most_keys, num_scores = int(keys_B.max(initial=0)), int((one.counts * keys_B).sum())
        paged = Paged(
            *(words, pages, starts, counts, first_keys, ends, num_keys, node_positions, limits, positions),
            *(page_size, int(one.counts.max(initial=0)), most_keys, int(keys_B.sum()), num_scores),
        )
        uploaded.append(DevicePass(token_ids_T, drawn_M, positions_T, slots_T, wanted_N, paged))
    return uploaded


def _arrays(one: StepLayout) -> list[npt.NDArray[Any]]:
    """Return the arrays in the order of `DevicePass` and `Paged`."""
    rows = [one.token_ids_T, one.drawn_M, one.positions_T, one.slots_T, one.wanted_N]
    sequences = [one.pages, one.starts, one.counts, one.first_keys, one.ends, one.num_keys, one.node_positions]
    return [*rows, one.words, *sequences, one.limits, one.positions_T.astype(np.int32)]


def _room(array: npt.NDArray[Any]) -> int:
    """Return the 64-bit words that an array takes. Each begins at 16 bytes: Triton compiles a kernel once more for
    pointers that do not."""
    return -(-array.nbytes // 16) * 2
