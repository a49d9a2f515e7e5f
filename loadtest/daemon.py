"""A daemon of our own to measure, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import httpx

_START_TIMEOUT_S = 600.0


@contextlib.contextmanager
def running_daemon(arguments: Sequence[str]) -> Iterator[str]:
    """Start `polydraft serve` on a free port; the URL, once it is ready. Raises RuntimeError if it exits."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Else a daemon that logs much would wait for someone to read it.
        reader = threading.Thread(target=deque, args=(process.stderr, 0))
        try:
            url = _wait_until_ready(process.stderr)
            reader.start()
            yield url
        finally:
            process.terminate()
            if reader.ident is not None:
                reader.join()


def process_folder(pattern: str) -> Path:
    """The folder below /proc of a process whose command line matches; raises RuntimeError where there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if re.search(pattern, command):
            return folder
    raise RuntimeError(f"no process matches {pattern}")


def _wait_until_ready(log: Iterable[str]) -> str:
    lines = []
    deadline = time.monotonic() + _START_TIMEOUT_S
    for line in log:
        lines.append(line)
        if " on http://" in line:
            url = line.rsplit(" on ", 1)[1].strip()
            httpx.get(f"{url}/ready").raise_for_status()
            return url
        if time.monotonic() > deadline:
            break
    raise RuntimeError("the daemon did not start:\n" + "".join(lines[-20:]))
