"""Layouts of passes in which one kernel reads every sequence's keys in their pages.

A query sees all keys of the text below its limit, and the nodes whose bit is set
in its words (`inputs.StepLayout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.inputs import StepLayout
from engine.kernels.transfer import Field, views


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
    """Most rows of a sequence; without `is_padded` it only chooses tiles."""
    most_keys: int
    total_keys: int = 0
    """Keys of all texts; 0 in a recorded step, whose texts grow."""
    num_scores: int = 0
    """Pairs of a query and a key; 0 in a recorded step."""
    is_padded: bool = False
    """Whether every sequence has room for `most_queries` rows."""
    shares: dict[Any, Tensor] | None = None
    """Shares of the kernel's programs, for all layers of this pass."""


class DevicePass(NamedTuple):
    """A pass on the device."""

    token_ids_T: Tensor
    drawn_M: Tensor
    positions_T: Tensor
    slots_T: Tensor
    wanted_N: Tensor
    paged: Paged | None
    numbers: Tensor
    """64-bit words of all arrays but `drawn_M` and `pages`."""


_ROWS = DevicePass._fields[:5]
_OPERANDS = Paged._fields[: Paged._fields.index("page_size")]
_LAST = ("drawn_M", "pages")
"""Arrays whose sizes differ in passes of equally many rows and sequences."""
_NAMES = (*(name for name in (*_ROWS, *_OPERANDS) if name not in _LAST), *_LAST)


def on_host(layout: StepLayout) -> DevicePass:
    """Return a pass whose model runs on the host, without a copy."""
    rows = {name: torch.from_numpy(getattr(layout, name)) for name in _ROWS}
    return DevicePass(**rows, paged=None, numbers=torch.empty(0, dtype=torch.int64))


def upload(passes: Sequence[StepLayout], page_size: int, device: torch.device) -> list[DevicePass]:
    """Copy the layouts of a step's passes to the device, in one asynchronous copy."""
    arrays = {f"{name} {i}": getattr(layout, name) for i, layout in enumerate(passes) for name in _NAMES}
    fields = [Field(name, array.dtype, array.shape) for name, array in arrays.items()]
    flat = np.zeros(sum(field.words for field in fields), dtype=np.int64)
    for name, view in views(flat, fields).items():
        view[...] = arrays[name]
    whole = torch.from_numpy(flat)
    if device.type != "cpu":
        whole = whole.pin_memory().to(device, non_blocking=True)
    tensors = views(whole, fields)
    uploaded = []
    start = 0
    for i, layout in enumerate(passes):
        keys_B = (layout.num_keys - layout.first_keys).astype(np.int64)
        paged = Paged(
            **{name: tensors[f"{name} {i}"] for name in _OPERANDS},
            page_size=page_size,
            most_queries=int(layout.counts.max(initial=0)),
            most_keys=int(keys_B.max(initial=0)),
            total_keys=int(keys_B.sum()),
            num_scores=int((layout.counts * keys_B).sum()),
        )
        rows = {name: tensors[f"{name} {i}"] for name in _ROWS}
        pass_fields = fields[i * len(_NAMES) : (i + 1) * len(_NAMES)]
        end = start + sum(field.words for field in pass_fields[: -len(_LAST)])
        uploaded.append(DevicePass(**rows, paged=paged, numbers=whole[start:end]))
        start += sum(field.words for field in pass_fields)
    return uploaded
