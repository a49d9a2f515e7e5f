"""The measurement of malformed requests during a stream, with few requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.malformed import measure, summary
from tests.server.daemon_process import MODEL, Daemons
from tests.server.tiny_models import write_pair


@pytest.mark.slow
def test_turns_are_told_apart(tmp_path: Path) -> None:
    """Requests are sent in every other turn, at about the rate; all are refused, and the stream goes on in both."""
    pair, pool = write_pair(tmp_path), Daemons(tmp_path)
    daemon = pool.get(str(pair.target), "--served-model-name", MODEL, "--num-threads", "1", "--no-calibrate")
    found = asyncio.run(measure(daemon.url, 200, 4, MODEL, turn_s=0.5))
    assert set(found["statuses"]) == {400}
    assert 40 < sum(found["statuses"].values()) < 400
    assert min(gaps["count"] for gaps in found["gaps_ms"].values()) > 5
    pool.stop()


def test_a_summary_is_in_milliseconds() -> None:
    assert summary([0.001] * 98 + [0.1, 0.5]) == pytest.approx({"count": 100, "p50": 1, "p99": 104, "longest": 500})
