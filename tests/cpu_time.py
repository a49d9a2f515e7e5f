"""CPU time of a test, which a busy machine does not change: of its process and of its children."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import process_time
from typing import Any

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_USUAL_WORK_S = 0.033
_shared_s = 0.0
_compiling: Any = None


def leave_out_compiling() -> None:
    """Count no kernels that Numba compiles in this process from now on."""
    global _compiling
    from numba.core import event

    _compiling = event.TimingListener()
    event.register("numba:compile", _compiling)


@cache
def slowness() -> float:
    """Return how much slower this machine is than that of the limits; at least 1."""
    return max(1.0, min(_work_s() for _ in range(5)) / _USUAL_WORK_S)


def _work_s() -> float:
    began_s = process_time()
    sum(number * number for number in range(500_000))
    return process_time() - began_s


def counted_s() -> float:
    """Return the CPU seconds of this process and its children so far.

    Kernels that are compiled are left out, and what `shared` excludes.
    """
    compiled_s = _compiling.duration if _compiling is not None and _compiling.done else 0.0
    return _spent_s() - compiled_s - _shared_s


@contextmanager
def shared() -> Iterator[None]:
    """Count nothing meanwhile: many tests share what is started here."""
    global _shared_s
    before_s = _spent_s()
    try:
        yield
    finally:
        _shared_s += _spent_s() - before_s


def _spent_s() -> float:
    times = os.times()
    ended_s = times.user + times.system + times.children_user + times.children_system
    return ended_s + sum(_running_s(child) for child in _children(os.getpid()))


def _children(process: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{process}/task")
        for thread in threads:
            with open(f"/proc/{process}/task/{thread}/children") as file:
                children = file.read().split()
            for child in map(int, children):
                yield child
                yield from _children(child)
    except OSError:  # it has ended meanwhile, or the kernel does not list children
        return


def _running_s(process: int) -> float:
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
