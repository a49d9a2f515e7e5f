"""Compiled kernels of a device: Triton's on CUDA, Numba's on a CPU. Each is compared once with plain torch."""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from engine.errors import LoadError, first_line

log = logging.getLogger("polydraft")

Compiler = Literal["Triton", "Numba"]
_CODE = Path(__file__).parents[1]
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

    They are tried once in a process. On failure a warning is logged, and callers use the plain operations. what:
    purpose of the kernels, as a clause for the log; find_fault: tries them on a device, for the kinds in `more`, and
    returns the fault or None.
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
    """Raise LoadError if a device computes nothing any more after an error, as after a read outside of its memory.

    Everything that is tried next would fail as well, with an error that names another place.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        raise LoadError(
            f"{device} has failed and needs another process: {first_line(error)}; CUDA_LAUNCH_BLOCKING=1 shows where"
        ) from error


def compiled_for_cpu(**options: Any) -> Callable[[Any], Any]:
    """Return Numba's decorator; compiled code is cached for later starts if there is a writable folder."""
    from numba import njit

    cache_folder()

    def decorate(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # neither the code's folder nor the user's is writable
            return njit(**options)(function)

    return decorate


@cache
def cache_folder() -> Path | None:
    """Let Numba cache compiled code (`compiled_files.py`), and return the folder; None if no folder is writable.

    The folder is named by everything that compiled code depends on. By default Numba detects changes of a kernel's own
    file, but not of the functions and constants compiled into it, of the compiler, or of the processor.
    """
    import llvmlite
    import numba
    from llvmlite import binding
    from numba.core import caching, config

    from engine.kernels.compiled_files import CompiledFiles

    processor = config.CPU_NAME, config.CPU_FEATURES, binding.get_host_cpu_name(), binding.get_host_cpu_features()
    compiler = numba.__version__, llvmlite.__version__, sys.version, np.__version__
    digest = hashlib.sha256(repr((processor, compiler)).encode())
    for file in sorted([*_CODE.rglob("numba_*.py"), _CODE / "kernels" / "compiled_files.py"]):
        digest.update(file.read_bytes())
    own, users = _CODE / "__pycache__", Path("~/.cache/polydraft").expanduser()
    for base in [Path(config.CACHE_DIR)] if config.CACHE_DIR else [own, users]:
        folder = base / f"kernels-{digest.hexdigest()[:16]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:  # the folder is not writable, or its disk is full
            continue
        config.CACHE_DIR = str(folder)
        caching.IndexDataCacheFile = CompiledFiles
        return folder
    return None
