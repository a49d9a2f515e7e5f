"""Compiles a CPU's kernels at a first start, in several processes, because Numba compiles on one core.

The processes leave the code in Numba's cache, where this start and later ones find it. What they do not compile is
compiled where it is first used.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from engine.config import ModelConfig
from engine.kernels import cache_folder
from engine.kernels.choosing import choose
from engine.models.host import usable_cores
from engine.models.loading import Progress, decoded_dtype

_LONGEST_S = 120.0
"""Seconds after which the processes are ended, and this one compiles."""


def compile_kernels(config: ModelConfig, progress: Progress) -> None:
    """Compile the kernels of the target if no earlier start has; call it before torch has made threads."""
    try:
        from engine.drafting import numba_levels
        from engine.models import cpu_weights, numba_decoder
    except ImportError:  # Numba is not installed
        return
    dtype, folder = decoded_dtype(config), cache_folder()
    num_processes = min(usable_cores(), 4)
    if dtype is None or folder is None or num_processes < 2:
        return
    weights, kv = cpu_weights.stored_types(dtype, config.weights == "int8", config.kv_dtype == "bfloat16")
    mark = folder / f"compiled-{weights}-{kv}"
    if mark.exists():
        return
    progress(f"compiling kernels in {num_processes} processes")
    # The longest first.
    jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (numba_decoder.functions_of_kv, (kv.type,)),
        (choose, (torch.device("cpu"),)),
        (numba_decoder.functions_of_weights, (weights.type,)),
        (numba_levels.draw, ()),
        (numba_decoder.work, ()),
    ]
    # Leaving the block ends the processes.
    with multiprocessing.get_context("fork").Pool(num_processes, torch.set_num_threads, (1,)) as pool:
        compiled = pool.starmap_async(_compile, jobs, chunksize=1)
        with suppress(multiprocessing.TimeoutError):
            if all(compiled.get(_LONGEST_S)):
                mark.touch()


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Return whether a call that compiles succeeded; if not, this process says why where it needs the kernel."""
    try:
        function(*arguments)
    except Exception:
        return False
    return True
