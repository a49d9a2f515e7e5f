"""Folder of the sockets between the HTTP process and the engine.

A process that is killed while its model loads leaves it; the next start removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from engine.api import ConfigError

INBOX = "inbox"
OUTBOX = "outbox"
_PREFIX = "polydraft-"
_LONGEST_SOCKET = 103
"""Maximum number of bytes in the path of a unix socket, on every system."""


class SocketFolder(tempfile.TemporaryDirectory[str]):
    """Folder that is locked while this process lives; in /tmp if the default path is too long."""

    def __init__(self) -> None:
        """Raises ConfigError if no folder can be created."""
        parent = tempfile.gettempdir()
        num_bytes_inside = len(f"/{_PREFIX}12345678/{OUTBOX}")
        if len(os.fsencode(parent)) + num_bytes_inside > _LONGEST_SOCKET:
            parent = "/tmp"
        try:
            for folder in Path(parent).glob(f"{_PREFIX}*"):
                _remove_if_left(folder)
            super().__init__(prefix=_PREFIX, dir=parent)
            self._lock: int | None = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(f"no folder for the engine's sockets ({error}); set TMPDIR to another") from error

    def cleanup(self) -> None:
        """Remove the folder and release its lock; no effect the second time."""
        super().cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of sockets if its process has ended."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, number)
        names = os.listdir(number)
        is_ours = os.fstat(number).st_uid == os.geteuid()
        has_sockets_only = bool(names) and {INBOX, OUTBOX}.issuperset(names)
        if not is_ours or not has_sockets_only:
            return
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in names:
            os.unlink(name, dir_fd=number)
        folder.rmdir()
