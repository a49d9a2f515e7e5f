"""schemathesis against our own /openapi.json: whatever it sends, no answer is a server error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.server.daemon_process import Daemon


def test_no_generated_call_is_a_server_error(daemon: Daemon, tmp_path: Path) -> None:
    """A thousand calls and more, in and out of the schema, with a fixed seed."""
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{daemon.url}/openapi.json",
            "--url",
            daemon.url,
            "--checks",
            "not_a_server_error",
            "--max-examples",
            "20",
            "--seed",
            "1",
            "--no-color",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout
    with daemon.client() as client:
        assert client.get("/ready").status_code == 200
