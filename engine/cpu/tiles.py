"""Permission to use the processor's tiles (Intel's AMX), which a process asks the system for once.

Threads that exist already may use tiles, too, and a fork inherits the permission. A program that is
started by exec does not, so each process decides for itself. Without permission an instruction on
tiles ends the process. So a child process tries one first; the child runs this file as a program.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import subprocess
import sys
from functools import cache
from typing import NamedTuple

_ARCH_PRCTL = 158
_GET_PERMISSIONS = 0x1022
_ASK_PERMISSION = 0x1023
_TILE_DATA = 18
"""The processor state of tiles, in both requests to the system."""
_LONGEST_S = 60.0
_CODE = bytes.fromhex(
    "c4e2784907"  # ldtilecfg [rdi]
    "c4e27b49c0"  # tilezero tmm0
    "c4e27849c0"  # tilerelease
    "c3"  # ret
)


class Tiles(NamedTuple):
    """Whether this process multiplies on tiles."""

    are_used: bool
    reason: str = ""
    """Reason for which tiles are not used."""

    @property
    def remark(self) -> str:
        """Return the remark of a start."""
        return "on tiles" if self.are_used else f"by dot products, because {self.reason}"


@cache
def tiles_of_process(has_tiles: bool) -> Tiles:
    """Ask for tiles, and return whether products use them."""
    if not has_tiles or sys.platform != "linux" or platform.machine() != "x86_64":
        return Tiles(False, "the processor has no tiles")
    reason = _failure_of_child([sys.executable, "-I", "-S", __file__]) or refusal()
    return Tiles(not reason, reason)


def refusal() -> str:
    """Ask the system for tiles. Return why it refuses them, or "" if it grants them."""
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    if system_call(_ARCH_PRCTL, _ASK_PERMISSION, _TILE_DATA):
        error = ctypes.get_errno()
        if error == errno.ENOSPC:
            return "a thread has a signal stack that is too small for tiles"
        return f"the system refuses tiles ({os.strerror(error)})"
    granted = ctypes.c_ulong()
    if system_call(_ARCH_PRCTL, _GET_PERMISSIONS, ctypes.byref(granted)) or not granted.value >> _TILE_DATA & 1:
        return "the system does not grant tiles"
    return ""


def use_tile() -> None:
    """Run an instruction on a tile. Without permission it ends the process."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(_CODE)
        configuration = (ctypes.c_uint8 * 64)()
        configuration[0] = 1  # palette
        configuration[16] = 64  # bytes of a row of the first tile
        configuration[48] = 1  # rows of the first tile
        start = ctypes.c_char.from_buffer(page)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(start))(ctypes.addressof(configuration))
        del start  # an exported buffer keeps the page from being closed


def _failure_of_child(command: list[str]) -> str:
    """Return why a child process could not use tiles, or "" if it used them."""
    try:
        child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LONGEST_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a child process cannot try them ({error})"
    if child.returncode < 0:
        return f"an instruction on tiles ended a child process with {signal.Signals(-child.returncode).name}"
    if child.returncode:
        return child.stderr.strip().rpartition("\n")[2]
    return ""


def _try_tiles() -> None:
    """Use a tile, or exit with the reason for which the system refuses tiles."""
    reason = refusal()
    if reason:
        sys.exit(reason)
    use_tile()


if __name__ == "__main__":
    _try_tiles()
