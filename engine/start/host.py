"""Use of the machine's cores and memory by the engine's processes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path

from engine.config import ModelConfig

# Larger than what a step allocates, so that loaded weights and the K/V pool are mapped as before.
_KEPT_BYTES = 256 << 20
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_quota: Path = _CPU_QUOTA) -> int:
    """Return the cores that this process may use: by machine, affinity, and container's quota."""
    return int(min(len(os.sched_getaffinity(0)), max(1.0, _quota(cpu_quota))))


def _quota(file: Path) -> float:
    """Return the CPU quota of the control group, in cores; infinity if there is no limit."""
    try:
        quota, period = file.read_text().split()
        return float(quota) / float(period)
    except (OSError, ValueError):  # another system, an older version of control groups, or "max"
        return math.inf


def most_cores(config: ModelConfig) -> int:
    """Return the most cores of a pass: configured, or all that OMP_NUM_THREADS leaves."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = usable_cores()
    return config.num_threads or (min(cores, max(1, int(asked))) if asked.isdecimal() else cores)


def cpu_threads(config: ModelConfig) -> int:
    """Return the threads of a process of the target: all cores but one, among its ranks."""
    return config.num_threads or max(1, (usable_cores() - 1) // config.tensor_parallel_size)


def keep_freed_memory() -> None:
    """Let glibc keep memory that large tensors free: fresh pages cost more than operations.

    The amount is bounded by the largest step.
    """
    trim_threshold, mmap_threshold = -1, -3
    call_glibc("mallopt", mmap_threshold, _KEPT_BYTES)
    call_glibc("mallopt", trim_threshold, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Return memory freed by loading and compiling to the system, once."""
    call_glibc("malloc_trim", 0)


def call_glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc, if this process uses glibc."""
    with contextlib.suppress(AttributeError, OSError):
        getattr(ctypes.CDLL(None), name)(*arguments)
