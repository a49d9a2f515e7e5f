"""Whether kernels do a piece of the work on a device: tried there once, beside the plain operations.

Triton compiles them for CUDA, Numba for a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
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
    """Whether they do; where they fail, or give other numbers, a line says so and the plain operations serve.

    what: what is done, as a clause; find_fault: says what is wrong with them on a device, for the kinds in `more`.
    """
    if device.type != _DEVICES[compiler]:
        return False
    try:
        is_there = find_spec(compiler.lower()) is not None
        fault = find_fault(device, *more) if is_there else f"{compiler} is not installed"
    except Exception as error:  # a compiler or a device that cannot run them
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
