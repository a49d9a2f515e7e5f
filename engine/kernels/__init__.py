"""Which compiled kernels a device uses: Triton's on CUDA, Numba's on a CPU, each tried once beside plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch

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
    """Whether the compiled kernels run on this device and give the numbers of the plain operations.

    Tried once in a process. On failure a warning is logged, and callers use the plain operations.
    what: what the kernels do, as a clause for the log; find_fault: tries them on a device, for the kinds in `more`, and
    says what is wrong, or None.
    """
    if device.type != _DEVICES[compiler]:
        return False
    try:
        fault = find_fault(device, *more)
    except Exception as error:  # a compiler that is missing, or a device that cannot run them
        fault = str(error) or type(error).__name__
    if fault is not None:
        log.warning("%s without %s kernels: %s", what, compiler, fault)
    return fault is None


def compiled_for_cpu(**options: Any) -> Callable[[Any], Any]:
    """Numba's decorator; what it compiles is kept for later starts where there is a folder for that."""
    from numba import njit

    def decorate(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # neither the code's folder nor the user's can be written to
            return njit(**options)(function)

    return decorate
