"""Copies between the host and a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Field(NamedTuple):
    """One array among others in one piece of memory."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        """Size in 64-bit words, rounded up to 16 bytes: kernels are compiled for arrays that begin at a multiple."""
        return -(-prod(self.shape) * int(np.dtype(self.dtype).itemsize) // 16) * 2


@cache
def _torch_type(dtype: Any) -> torch.dtype:
    found: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return found


def views(flat: Any, fields: Sequence[Field]) -> dict[str, Any]:
    """Return the arrays of a piece of memory, by name. flat: 64-bit words, of numpy or torch."""
    found = {}
    start = 0
    type_of = np.dtype if isinstance(flat, np.ndarray) else _torch_type
    for field in fields:
        end = start + field.words
        found[field.name] = flat[start:end].view(type_of(field.dtype))[: prod(field.shape)].reshape(field.shape)
        start = end
    return found


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to a tensor on `device`, without waiting for the copy."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_device_at_once(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy host arrays to tensors on `device`, all in one copy that is not waited for."""
    if device.type == "cpu" or not arrays:
        return [torch.from_numpy(one) for one in arrays]
    fields = [Field(str(number), one.dtype, one.shape) for number, one in enumerate(arrays)]
    flat = np.zeros(sum(field.words for field in fields), dtype=np.int64)
    for part, one in zip(views(flat, fields).values(), arrays, strict=True):
        part[...] = one
    return list(views(torch.from_numpy(flat).pin_memory().to(device, non_blocking=True), fields).values())


def fill(buffer: Tensor, values: npt.NDArray[Any]) -> None:
    """Write a host array into a tensor of its shape, in one asynchronous copy."""
    tensor = torch.from_numpy(values)
    buffer.copy_(tensor if buffer.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Return tensors of int64 or of floating point as host arrays of int64 or float64, by one copy: it waits once for
    all.

    For tensors on a CPU they may be views, which are read-only.
    """
    if are_here(tensors):
        return [(one if one.dtype == torch.int64 else one.double()).numpy() for one in tensors]
    words = [one.reshape(-1) if one.dtype == torch.int64 else bits(one) for one in tensors]
    whole = np.array(torch.cat(words).tolist(), dtype=np.int64)
    ends = np.cumsum([len(one) for one in words])
    return [
        (part if one.dtype == torch.int64 else part.view(np.float64)).reshape(one.shape)
        for one, part in zip(tensors, np.split(whole, ends[:-1]), strict=True)
    ]


def are_here(tensors: Sequence[Tensor]) -> bool:
    """Whether the host can read the tensors without a copy."""
    return all(one.device.type == "cpu" for one in tensors)


def bits(values: Tensor) -> Tensor:
    """Return the bits of float64 values as int64."""
    return values.reshape(-1).double().view(torch.int64)
