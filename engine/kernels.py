"""Whether Triton kernels do a piece of the work on a device: tried there once, beside the plain operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

log = logging.getLogger("polydraft")


@cache
def usable(what: str, find_fault: Callable[..., str | None], device: torch.device, *more: object) -> bool:
    """Whether they do; where they fail, or give other numbers, a line says so and the plain operations serve.

    what: what is done, as a clause; find_fault: says what is wrong with them on a device, for the kinds in `more`.
    """
    if device.type != "cuda":
        return False
    try:
        fault = find_fault(device, *more) if find_spec("triton") is not None else "Triton is not installed"
    except Exception as error:  # a compiler or a device that cannot run them
        fault = str(error) or type(error).__name__
    if fault is not None:
        log.warning("%s without Triton kernels: %s", what, fault)
    return fault is None
