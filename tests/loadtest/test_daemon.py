"""A daemon that is started to be measured."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from loadtest.daemon import running_daemon
from tests.server.tiny_models import write_pair

_PIPE_BYTES = 64 << 10


@pytest.mark.slow
def test_a_daemon_that_logs_much_is_not_held_up(tmp_path: Path) -> None:
    """More lines than a pipe holds are read while it runs."""
    pair = write_pair(tmp_path)
    words = [str(pair.target), "--draft-model", str(pair.draft), "--no-calibrate", "--enable-log-requests"]
    with running_daemon(words) as url, httpx.Client(base_url=url) as client:
        for _ in range(_PIPE_BYTES // 60):
            assert client.get("/version").status_code == 200
