"""Numba's compiler, with its code cached for later starts."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba import njit
from numba.core import caching, config

from engine.cpu.compiled_files import CompiledFiles

_CODE = Path(__file__).parents[1]


def compiled_for_cpu(**options: Any) -> Callable[[Any], Any]:
    """Return Numba's decorator, which caches code for later starts if it can."""
    cache_folder()

    def decorate(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # neither the code's folder nor the user's is writable
            return njit(**options)(function)

    return decorate


@cache
def cache_folder() -> Path | None:
    """Let Numba cache compiled code; return the folder, None if none is writable.

    The folder's name depends on everything that compiled code depends on. By default Numba detects
    changes of a kernel's file, but not of the functions and constants compiled into it, of the
    compiler, or of the processor.
    """
    processor = config.CPU_NAME, config.CPU_FEATURES, binding.get_host_cpu_name(), binding.get_host_cpu_features()
    compiler = numba.__version__, llvmlite.__version__, sys.version, np.__version__
    digest = hashlib.sha256(repr((processor, compiler)).encode())
    constants = _CODE / "noise.py"  # of the random numbers
    for file in [*sorted(_CODE.glob("cpu/compiled/*.py")), _CODE / "cpu" / "compiled_files.py", constants]:
        digest.update(file.read_bytes())
    bases = [_CODE / "__pycache__", Path("~/.cache/polydraft").expanduser()]
    if config.CACHE_DIR:
        bases = [Path(config.CACHE_DIR)]
    for base in bases:
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
