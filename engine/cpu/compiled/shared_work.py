"""Share the work of one call among cores, in Numba.

The caller and helper threads run the same function over the same table of arrays. It runs in
phases, and threads claim the parts of a phase one by one. No thread waits for a helper to
begin: if a helper is late, or its core is busy, other threads do the parts. A phase ends when
all its parts are done.

Between two calls a helper polls for work, and yields its core to other threads that want it; after
a while it sleeps.
"""

# Numba sees a kernel's arguments only when it is run, and an intrinsic's body handles them as a
# list.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"
# ruff: noqa: ARG001

from __future__ import annotations

import platform
import sys
import threading

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from engine.cpu.compiler import compiled_for_cpu

CAN_SHARE = sys.platform == "linux"
"""Whether this system has the semaphores that helpers sleep on."""
PHASE_SIZE = 16
"""Numbers of a phase's counters: two counters, a cache line apart, and unused numbers."""
_NEXT = 0
_DONE = 8
_MOST_HELPERS = 255
_GATE, _CALL, _BUSY, _FUNCTION, _TABLE, _WANTED, _HELPERS = range(0, 7 * 8, 8)
"""Places in the state that caller and helpers share, a cache line each.

Lines of helpers follow: whether the helper sleeps, and its semaphore.
"""
_OPEN = 1 << 32
"""Bit in the gate, above the number of helpers inside."""
_POLLS_BEFORE_YIELD = 2000
"""Polls, with a pause after each, before a waiting core yields: tens of microseconds."""
_YIELDS_BEFORE_SLEEP = 5000
"""Yields before a helper sleeps: milliseconds, to be awake for the next step."""

_LONG = ir.IntType(64)
_give_way = types.ExternalFunction("sched_yield", types.int32())
_prepare = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.uint32))
_sleep = types.ExternalFunction("sem_wait", types.int32(types.int64))
_wake = types.ExternalFunction("sem_post", types.int32(types.int64))


def _atomic(operation):
    @intrinsic
    def change(_context, address, value):
        def build(_context, builder, _signature, operands):
            pointer = builder.inttoptr(operands[0], _LONG.as_pointer())
            return builder.atomic_rmw(operation, pointer, operands[1], "seq_cst")

        return types.int64(types.int64, types.int64), build

    return change


# Add to the counter at an address, or write it; return its previous value.
_add, _swap = _atomic("add"), _atomic("xchg")


@intrinsic
def _look(_context, address):
    """Return the counter at an address; all earlier writes are visible."""

    def build(_context, builder, _signature, operands):
        pointer = builder.inttoptr(operands[0], _LONG.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), build


@intrinsic
def _pause(_context):
    """Hint to the processor that this core waits."""

    def build(context, builder, _signature, _operands):
        if platform.machine() in ("x86_64", "AMD64"):
            pause = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=pause), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def call(_context, function, first, second, third, fourth, fifth, sixth):
    """Call the function of six integers at an address."""

    def build(context, builder, _signature, operands):
        kind = ir.FunctionType(ir.VoidType(), [_LONG] * 6)
        builder.call(builder.inttoptr(operands[0], kind.as_pointer()), operands[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), build


@intrinsic
def pointer_to(_context, address):
    """Return a pointer to an address, for `carray`."""

    def build(_context, builder, _signature, operands):
        return builder.inttoptr(operands[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


def c_function(function):
    """Return a function of six integers as a C function, which is compiled once for a machine."""
    kind = types.void(*[types.int64] * 6)
    try:
        return cfunc(kind, cache=True)(function)
    except RuntimeError:  # neither the code's folder nor the user's is writable
        return cfunc(kind)(function)


@njit  # not from Numba's cache: a generator that it loads cannot be used in code that it compiles
def claimed(counters, phase, num_parts):
    """Yield the parts of a phase that this thread claims, until all are done.

    counters: address of [phases, `PHASE_SIZE`] int64, all 0 before the first phase.
    """
    next_part = counters + (phase * PHASE_SIZE + _NEXT) * 8
    num_done = counters + (phase * PHASE_SIZE + _DONE) * 8
    count = 0
    part = _add(next_part, 1)
    while part < num_parts:
        yield part
        count += 1
        part = _add(next_part, 1)
    _add(num_done, count)
    looks = 0
    while _look(num_done) < num_parts:
        looks = _wait(looks)


@compiled_for_cpu()
def _wait(looks):
    """Wait longer with every poll; return the number of polls plus one."""
    if looks < _POLLS_BEFORE_YIELD:
        _pause()
    else:
        _give_way()
    return looks + 1


@compiled_for_cpu()
def _sleep_until_called(state, number, last_call):
    """Sleep unless there was a call after the last one; return the last call's number.

    The helper announces its sleep and then looks for a call again, so it misses no wake-up. It
    skips a call that does not want it. Otherwise that call would keep it from sleeping later.
    """
    asleep = state + (_HELPERS + 8 * number) * 8
    _swap(asleep, 1)
    if _look(state + _CALL * 8) == last_call:
        _sleep(asleep + 8)
    _swap(asleep, 0)
    if _look(state + _WANTED * 8) <= number:
        return _look(state + _CALL * 8)
    return last_call


@compiled_for_cpu()
def _try_lock(state):
    """Reserve the helpers for a call; return whether no other thread uses them."""
    return _swap(state + _BUSY * 8, 1) == 0


@compiled_for_cpu(nogil=True)
def _help(shared, number):
    """Take part in every call that wants this helper, until the process ends."""
    state = np.int64(shared.ctypes.data)
    gate = state + _GATE * 8
    last_call = 0
    while True:
        looks = 0
        while _look(state + _CALL * 8) == last_call or _look(state + _WANTED * 8) <= number:
            looks = _wait(looks)
            if looks > _POLLS_BEFORE_YIELD + _YIELDS_BEFORE_SLEEP:
                last_call = _sleep_until_called(state, number, last_call)
                looks = 0
        last_call = _look(state + _CALL * 8)
        if _add(gate, 1) >= _OPEN:
            call(shared[_FUNCTION], shared[_TABLE], 0, 0, 0, 0, 0)
        _add(gate, -1)


@compiled_for_cpu()
def together(shared, function, table, num_helpers):
    """Call the function at an address with a table's address, here and in helpers."""
    state = np.int64(shared.ctypes.data)
    if num_helpers <= 0 or not _try_lock(state):
        call(function, table, 0, 0, 0, 0, 0)
        return
    shared[_FUNCTION], shared[_TABLE] = function, table
    _swap(state + _WANTED * 8, num_helpers)
    gate = state + _GATE * 8
    _add(gate, _OPEN)
    _add(state + _CALL * 8, 1)
    for number in range(num_helpers):
        asleep = state + (_HELPERS + 8 * number) * 8
        if _swap(asleep, 0) == 1:
            _wake(asleep + 8)
    call(function, table, 0, 0, 0, 0, 0)
    _add(gate, -_OPEN)
    looks = 0
    while _look(gate) > 0:
        looks = _wait(looks)
    _swap(state + _BUSY * 8, 0)


class Team:
    """Helper threads of a process, which sleep when there is no shared work."""

    def __init__(self) -> None:
        self.shared = np.zeros(_HELPERS + 8 * _MOST_HELPERS, dtype=np.int64)
        """State that `together` shares with the helpers."""
        self._num_helpers = 0

    def grow(self, num_helpers: int) -> int:
        """Start helpers up to this number if possible; return how many a call may use."""
        num_helpers = min(num_helpers, _MOST_HELPERS) if CAN_SHARE else 0
        for number in range(self._num_helpers, num_helpers):
            _prepare_helper(self.shared, number)
            # Helpers run compiled code, without the interpreter's lock, until the process ends.
            helper = threading.Thread(target=_help, args=(self.shared, number), name=f"helper {number}", daemon=True)
            helper.start()
            self._num_helpers += 1
        return num_helpers


@compiled_for_cpu()
def _prepare_helper(shared, number):
    _prepare(np.int64(shared.ctypes.data) + (_HELPERS + 8 * number + 1) * 8, np.int32(0), np.uint32(0))


TEAM = Team()
