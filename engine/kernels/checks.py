"""Checks of compiled kernels: each kernel runs once in a process, against plain operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Literal

import torch
from torch import Tensor

from engine.errors import LoadError, first_line

log = logging.getLogger("polydraft")

Compiler = Literal["Triton", "Numba"]
_DEVICES = {"Triton": "cuda", "Numba": "cpu"}


@cache
def usable(
    what: str,
    find_fault: Callable[..., str | None],
    device: torch.device,
    *more: object,
    compiler: Compiler = "Triton",
) -> bool:
    """Whether the compiled kernels run on this device and agree with the plain operations.

    The kernels are tried once in a process. On failure a warning is logged, and callers use the
    plain operations. what: purpose of the kernels, as a clause for the log; find_fault: tries the
    kernels on a device, with the operands `more`, and returns the fault or None.
    """
    if device.type != _DEVICES[compiler]:
        return False
    try:
        fault = find_fault(device, *more)
    except Exception as error:  # a compiler that is missing, or a device that cannot run them
        raise_if_lost(device, error)
        fault = str(error) or type(error).__name__
    if fault is not None:
        log.warning("%s without %s kernels: %s", what, compiler, fault)
    return fault is None


def raise_if_lost(device: torch.device, error: Exception) -> None:
    """Raise LoadError if an error has disabled a device, for example a read outside its memory.

    Later calls would fail, too, with an error that names another place.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise LoadError(
            f"{device} has failed and needs another process: {first_line(error)}; CUDA_LAUNCH_BLOCKING=1 shows where"
        ) from error


def synthetic_rows(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return distinct numbers to try kernels on, the same every time."""
    return torch.arange(prod(shape), device=device).sqrt().mul(7).sin().view(shape).to(dtype)


def close(computed: Tensor, expected: Tensor) -> bool:
    """Whether numbers of about 1 differ by no more than a few roundings."""
    tolerance = 16 * torch.finfo(computed.dtype).eps
    return torch.allclose(computed.float(), expected.float(), atol=tolerance, rtol=0)
