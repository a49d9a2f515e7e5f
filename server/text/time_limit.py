"""Ends Python code that runs too long in a thread."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

Result = TypeVar("Result")

_AGAIN_S = 0.05
_ENDING: set[asyncio.Task[None]] = set()
"""References to running tasks; the event loop has only weak references."""


class TookTooLong(BaseException):
    """A call exceeded its time. No `Exception`, because libraries catch those."""


class LimitedCall:
    """Call in some thread that another thread can end."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._began_s = 0.0
        self._is_ended = False

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            if self._is_ended:
                raise TookTooLong
            self._thread, self._began_s = threading.get_ident(), time.monotonic()
        try:
            return self._call(*args)
        finally:
            self._leave()

    def _leave(self) -> None:
        """Forbid further exceptions: the thread's next work is not this call."""
        while self._thread is not None:
            try:
                with self._lock:
                    thread, self._thread = self._thread, None
                    _raise_in(thread, None)
            except TookTooLong:  # arrived while waiting for the lock
                continue

    def seconds_run(self) -> float:
        """Time that it has run; 0 if it waits for a thread."""
        with self._lock:
            return 0.0 if self._thread is None else time.monotonic() - self._began_s

    def is_running(self) -> bool:
        """Whether it is running."""
        with self._lock:
            return self._thread is not None

    def end(self) -> None:
        """Raise TookTooLong in its thread, now or once it begins."""
        with self._lock:
            self._is_ended = True
            if self._thread is not None:
                _raise_in(self._thread, TookTooLong)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


async def _end(limited: LimitedCall) -> None:
    """End a call by an error, raised until it has ended: finalizers may lose it."""
    limited.end()
    while limited.is_running():
        await asyncio.sleep(_AGAIN_S)
        limited.end()


async def run_limited(pool: Executor, seconds: float, call: Callable[..., Result], *args: Any) -> Result:
    """Return the result of `call(*args)` in the pool; raises TookTooLong after `seconds` of it.

    Loops in Python (and so in templates) end at once, a long call into a library ends afterwards.
    Waiting for a thread does not count. Cancelling the caller ends the call, too.
    """
    limited = LimitedCall(call)

    async def watch() -> None:
        while (left := seconds - limited.seconds_run()) > 0:
            await asyncio.sleep(left)
        await _end(limited)

    watching = asyncio.create_task(watch())
    try:
        result: Result = await asyncio.get_running_loop().run_in_executor(pool, limited, *args)
        return result
    except asyncio.CancelledError:
        ending = asyncio.create_task(_end(limited))
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)
        raise
    finally:
        watching.cancel()
