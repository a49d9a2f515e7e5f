"""Processes with access to a hub, or to none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.server.daemon_process import ROOT

NO_HUB = "http://127.0.0.1:1"
"""Nothing listens there, so that a connection is refused at once."""


def run_python(code: str, cache: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process with this hub; the client reads the environment once."""
    own = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "POLYDRAFT_PROFILE_CACHE": "off"}
    command = [sys.executable, "-c", code, *words]
    environment = {**os.environ, **own}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
