"""The JDK's HTTP client, which offers HTTP/2; skipped without `java`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.daemon_process import MODEL, Daemon

PROGRAM = Path(__file__).parent / "java" / "Check.java"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="there is no java here")
def test_the_client_of_the_jdk_is_served(daemon: Daemon) -> None:
    """With a length, in chunks, and as a stream."""
    done = subprocess.run(
        ["java", str(PROGRAM), daemon.url, MODEL], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line[:3] for line in done.stdout.splitlines()] == ["200"] * 3
    assert done.stdout.strip().endswith("[DONE]")
