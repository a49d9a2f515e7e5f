"""Reasons for which a system refuses tiles, for child processes of tests: they cannot be undone."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

_LIBRARY: Any = ctypes.CDLL(None, use_errno=True)
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FIRST_ARGUMENT = 16
"""Byte of the lower half of a system call's first argument, in what a filter reads."""
_ANSWER_ERROR, _ALLOW = 0x00050000, 0x7FFF0000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


def refuse(error: int) -> None:
    """Let the system answer requests for tiles with an error, also in programs started by exec."""
    program = [
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 3, 158),  # arch_prctl, or skip three
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_IF_EQUAL, 0, 1, 0x1023),
        (_RETURN, 0, 0, _ANSWER_ERROR | error),
        (_RETURN, 0, 0, _ALLOW),
    ]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    described = struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions))
    assert _LIBRARY.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert _LIBRARY.prctl(_SET_SECCOMP, _FILTER, described, 0, 0) == 0, os.strerror(ctypes.get_errno())


def take_small_signal_stack() -> Any:
    """Give this thread a signal stack without room for tiles; return the stack's memory."""
    memory = ctypes.create_string_buffer(8192)
    stack = struct.pack("PixxxxN", ctypes.addressof(memory), 0, len(memory))
    assert _LIBRARY.sigaltstack(stack, None) == 0
    return memory
