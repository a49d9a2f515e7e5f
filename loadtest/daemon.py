"""A daemon of our own to measure, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx

_START_TIMEOUT_S = 600.0


@contextlib.contextmanager
def running_daemon(arguments: Sequence[str]) -> Iterator[str]:
    """Start `polydraft serve` on a free port; the URL, once it is ready. Raises RuntimeError if it exits."""
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield _wait_until_ready(process)
    finally:
        process.terminate()
        process.communicate()


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    lines = []
    deadline = time.monotonic() + _START_TIMEOUT_S
    for line in process.stderr:
        lines.append(line)
        if " on http://" in line:
            url = line.rsplit(" on ", 1)[1].strip()
            httpx.get(f"{url}/ready").raise_for_status()
            return url
        if time.monotonic() > deadline:
            break
    raise RuntimeError("the daemon did not start:\n" + "".join(lines[-20:]))
