"""How a process of the engine uses the machine's cores and memory."""

from __future__ import annotations

import ctypes
import os

from engine.config import ModelConfig

# Larger than what a step allocates, so that loaded weights and the K/V pool are mapped as before.
_KEPT_BYTES = 256 << 20


def cpu_threads(config: ModelConfig) -> int:
    """Threads of one process of the target: all cores but one, shared among its ranks."""
    return config.num_threads or max(1, ((os.cpu_count() or 2) - 1) // config.tensor_parallel_size)


def keep_freed_memory() -> None:
    """Let glibc keep what large tensors leave behind: fresh pages cost more than most of what is computed in them.

    Without glibc nothing changes. Memory that is kept is bounded by the largest step.
    """
    trim_threshold, mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(mmap_threshold, _KEPT_BYTES)
    mallopt(trim_threshold, _KEPT_BYTES)
