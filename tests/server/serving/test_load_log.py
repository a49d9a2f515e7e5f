"""The log line about load: rates between two lines, nothing while nothing is answered."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
import pytest
from msgspec.structs import replace

from engine.api import StepResults, log_fields
from engine.logs import TextFormatter
from server.serving.live import Live
from server.serving.load_log import INTERVAL_S, LoadLog
from tests.server.daemon_process import MODEL, Daemons
from tests.server.event_stream import open_stream
from tests.server.step_results import outcome, stats


def take(live: Live, *parts: tuple[int, int]) -> None:
    """Speculative steps of (emitted, accepted) tokens, each as long as a plain one."""
    for num_tokens, num_accepted in parts:
        live.take(outcome(num_tokens, num_accepted), stats(wall_s=0.01, plain_s=0.01))


def test_the_line_counts_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens from before a read are in no later line."""
    clock = iter([0.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    live = Live()
    take(live, (4, 3), (4, 3))
    load = LoadLog(live, lambda: 10)
    live.step(StepResults([], stats=replace(stats(), num_running=2, num_waiting=3, num_blocks_used=4)))
    take(live, (5, 4), (1, 0))
    first = load.read()
    assert first is not None
    assert first["tokens_per_second"] == pytest.approx(0.6)
    assert first["tokens_per_pass"] == first["tokens_per_step"] == pytest.approx(3)
    assert first["speedup"] == pytest.approx(3)
    assert (first["running"], first["waiting"], first["kv_cache_usage"]) == (2, 3, 0.4)
    assert first["resting"] == 0
    live.take(outcome(1, 0, draft_length=0), stats())
    live.take(msgspec.structs.replace(outcome(1, 0, draft_length=0), rests=True), stats())
    second = load.read()
    assert second is not None
    assert second["tokens_per_second"] == pytest.approx(0.5)
    assert second["tokens_per_pass"] == 1
    assert (second["tokens_per_step"], second["speedup"]) == (None, None)
    assert second["resting"] == 0.5
    assert load.read() is None


def test_numbers_of_a_line_have_four_digits_and_no_exponent() -> None:
    record = logging.LogRecord("polydraft", logging.INFO, "", 0, "request", (), None)
    record.__dict__.update(log_fields(total_ms=31_860.4, ttft_ms=9_999.5, queue_ms=0.012345, rate=87.654321))
    assert TextFormatter().format(record).endswith("total_ms=31860 ttft_ms=10000 queue_ms=0.01235 rate=87.65")


def test_idle_daemon_logs_no_load(caplog: pytest.LogCaptureFixture) -> None:
    """One line for one interval with tokens, and none for those without."""
    caplog.set_level(logging.INFO, "polydraft")
    live = Live()

    async def some_intervals() -> None:
        running = asyncio.create_task(LoadLog(live, lambda: 10).run(0.01))
        await asyncio.sleep(0.05)
        assert not caplog.records
        take(live, (3, 2))
        await asyncio.sleep(0.1)
        running.cancel()

    asyncio.run(some_intervals())
    (record,) = caplog.records
    assert (record.message, record.__dict__["fields"]["tokens_per_step"]) == ("load", 3)


def test_an_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    load = LoadLog(Live(), lambda: 10)
    load._num_blocks = lambda: 1 // 0
    asyncio.run(load.run(0))
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.slow
def test_a_daemon_reports_its_load(daemons: Daemons, pair_arguments: list[str]) -> None:
    """While a stream runs."""
    daemon = daemons.get(*pair_arguments, "--no-calibrate")
    until = time.monotonic() + INTERVAL_S + 3
    with daemon.client() as http:
        while time.monotonic() < until:
            with open_stream(http, "/v1/completions", model=MODEL, prompt="a", max_tokens=90) as stream:
                stream.read()
    assert "INFO load running=" in daemon.log
