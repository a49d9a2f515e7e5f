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
    """An array in a piece of memory that several arrays share."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        """Return the size in 64-bit words, rounded up to 16 bytes.

        Kernels are compiled for arrays that begin at a multiple of 16 bytes.
        """
        size_bytes = prod(self.shape) * int(np.dtype(self.dtype).itemsize)
        return -(-size_bytes // 16) * 2


@cache
def _torch_type(dtype: Any) -> torch.dtype:
    torch_type: torch.dtype = getattr(torch, np.dtype(dtype).name)
    return torch_type


def views(flat: Any, fields: Sequence[Field]) -> dict[str, Any]:
    """Return the arrays of a piece of memory, by name. flat: 64-bit words, of numpy or torch."""
    arrays = {}
    start = 0
    type_of = np.dtype if isinstance(flat, np.ndarray) else _torch_type
    for field in fields:
        end = start + field.words
        padded = flat[start:end].view(type_of(field.dtype))
        arrays[field.name] = padded[: prod(field.shape)].reshape(field.shape)
        start = end
    return arrays


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to a tensor on `device`, without waiting for the copy."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_at_once(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy host arrays to tensors on `device`, in one asynchronous copy."""
    if device.type == "cpu" or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    fields = [Field(str(number), array.dtype, array.shape) for number, array in enumerate(arrays)]
    flat = np.zeros(sum(field.words for field in fields), dtype=np.int64)
    for part, array in zip(views(flat, fields).values(), arrays, strict=True):
        part[...] = array
    return list(views(to_device(flat, device), fields).values())


def fill(buffer: Tensor, values: npt.NDArray[Any]) -> None:
    """Write a host array into a tensor of its shape, in one asynchronous copy."""
    tensor = torch.from_numpy(values)
    if buffer.device.type != "cpu":
        tensor = tensor.pin_memory()
    buffer.copy_(tensor, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Return tensors of int64 or of floating point as host arrays of int64 or float64.

    One copy for all tensors, which waits for the device. The arrays of tensors on a CPU may be
    views, which are read-only.
    """
    if are_here(tensors):
        return [_words_or_doubles(tensor).numpy() for tensor in tensors]
    words = [_words_or_doubles(tensor).reshape(-1).view(torch.int64) for tensor in tensors]
    whole = np.array(torch.cat(words).tolist(), dtype=np.int64)
    ends = np.cumsum([len(part) for part in words])
    arrays: list[npt.NDArray[Any]] = []
    for tensor, part in zip(tensors, np.split(whole, ends[:-1]), strict=True):
        if tensor.dtype != torch.int64:
            part = part.view(np.float64)
        arrays.append(part.reshape(tensor.shape))
    return arrays


def _words_or_doubles(tensor: Tensor) -> Tensor:
    """Return int64 as it is, and other numbers as float64."""
    return tensor if tensor.dtype == torch.int64 else tensor.double()


def are_here(tensors: Sequence[Tensor]) -> bool:
    """Whether the host can read the tensors without a copy."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def bits(values: Tensor) -> Tensor:
    """Return the bits of float64 values as int64."""
    return values.reshape(-1).double().view(torch.int64)
