"""The measurement of malformed requests during a stream, with few requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.malformed import measure
from loadtest.neighbour import Disturbance
from tests.server.daemon_process import MODEL, Daemons
from tests.server.tiny_models import write_pair


@pytest.mark.slow
def test_turns_are_told_apart(tmp_path: Path) -> None:
    """Requests are sent in every other turn, at about the rate; all are refused, and the stream
    goes on in both.
    """
    pair, pool = write_pair(tmp_path), Daemons(tmp_path)
    daemon = pool.get(str(pair.target), "--served-model-name", MODEL, "--num-threads", "1", "--no-calibrate")
    found = asyncio.run(measure(daemon.url, 200, 4, MODEL, turn_s=0.5))
    assert set(found["statuses"]) == {"400"}
    assert 40 < sum(found["statuses"].values()) < 400
    assert min(gaps["count"] for gaps in found["gaps_ms"].values()) > 5
    pool.stop()


def test_a_summary_is_in_milliseconds() -> None:
    turns = Disturbance()
    turns.gaps_s[True] = [0.001] * 98 + [0.1, 0.5]
    found = turns.gaps_ms()
    assert found["beside"] == pytest.approx(
        {"count": 100, "over_100_ms": 1, "p50": 1, "p99": 104, "p99.9": 460.4, "longest": 500}
    )
    assert found["alone"]["count"] == 0


def test_the_end_of_a_watched_stream_ends_the_turns() -> None:
    """The error of a task is raised at once, and the others are cancelled."""
    turns, cancelled = Disturbance(), []

    async def goes_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(turns.is_on)

    async def breaks_off() -> None:
        while not turns.is_on:
            await asyncio.sleep(0.01)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(turns.alternate([goes_on(), breaks_off()], [0.05, 60]))
    assert cancelled == [True]
