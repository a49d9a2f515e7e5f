"""Starts a daemon for measurements."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.1
_SHOWN_LINES = 20


@contextlib.contextmanager
def running_daemon(arguments: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[str]:
    """Start a daemon as `pausable_daemon` does, and yield its URL."""
    with pausable_daemon(arguments, prefix) as daemon:
        yield daemon.url


class Daemon(NamedTuple):
    """A ready daemon."""

    url: str
    group: int
    """Number of the group of its processes."""

    def pause(self) -> None:
        """Stop all its processes, as if nobody shared the machine."""
        os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        os.killpg(self.group, signal.SIGCONT)


@contextlib.contextmanager
def pausable_daemon(arguments: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[Daemon]:
    """Start `polydraft serve` on a free port and yield it when it is ready.

    arguments: flags of `serve` except `--host`, `--port`, `--uds` and those of TLS. prefix: command
    that starts it, for example with other system limits. Raises RuntimeError with the last lines of
    the log if the daemon exits or is not ready after ten minutes.
    """
    url = f"http://127.0.0.1:{(port := _free_port())}"
    serve = [sys.executable, "-m", "server.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    command = [*prefix, *serve]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        # The log is read all the time, because the daemon would block on a full pipe.
        log = deque[str](maxlen=_SHOWN_LINES)
        reader = threading.Thread(target=log.extend, args=(process.stderr,))
        reader.start()
        try:
            if not _becomes_ready(process, url):
                what = "did not become ready" if process.poll() is None else f"exited with {process.returncode}"
                _stop(process)
                reader.join()
                raise RuntimeError(f"the daemon {what}; the end of its log:\n{''.join(log)}")
            daemon = Daemon(url, process.pid)
            yield daemon
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
            _stop(process)
            reader.join()


def in_folder(folder: Path) -> list[str]:
    """Return the prefix of a daemon of another version of the project, from its checkout."""
    folder = folder.resolve()
    return ["env", "--chdir", str(folder), f"PYTHONPATH={folder}"]


def _stop(process: subprocess.Popen[str]) -> None:
    """Let the daemon drain, and kill it if that takes too long."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _becomes_ready(process: subprocess.Popen[str], url: str) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", trust_env=False).is_success:
                return True
        time.sleep(_POLL_S)
    return False
