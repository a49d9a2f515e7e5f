"""The official JavaScript client; an optional job (`make npm-check`), skipped where it is not installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.server.daemon_process import MODEL, Daemon

FOLDER = Path(__file__).parent / "npm"


@pytest.mark.skipif(not (FOLDER / "node_modules").is_dir(), reason="the npm client is not installed: make npm-check")
def test_the_javascript_client_is_served(daemon: Daemon) -> None:
    done = subprocess.run(
        ["node", "check.mjs", daemon.url, MODEL], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["streamed"] == found["helper"] == found["response"] != ""
    assert found["completionTokens"] == 20
    assert found["events"][0] == "response.created"
    assert found["events"][-1] in ("response.incomplete", "response.completed")
    assert found["refusal"] == {"status": 400, "param": "temperature"}
