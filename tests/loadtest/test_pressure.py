"""Disturbances of a daemon: their bodies, and what the neighbour and the table say of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest import pressure
from loadtest.bodies import ENDPOINTS, KINDS, crowds, limits, sweep
from loadtest.neighbour import _Seen
from loadtest.pressure import DISTURBANCES, Target, disturb_with_crowds, markdown, neighbour_of, short_request
from tests.server.daemon_process import Daemons
from tests.server.tiny_models import write_pair
from tests.wrong import instead

SIZE = 20_000
DESCRIBED = {
    "paths": {
        path: {"post": {"requestBody": {"content": {"application/json": {"schema": {"properties": {"prompt": {}}}}}}}}
        for path in ENDPOINTS
    }
}


def test_every_field_gets_every_kind_of_value_at_full_size() -> None:
    bodies = list(sweep(DESCRIBED, "m", SIZE))
    assert len(bodies) == len(ENDPOINTS) * len(KINDS)
    assert all(SIZE / 2 < len(body.build()) <= SIZE for body in bodies)
    for body in bodies:
        if body.kind not in ("digits", "deep lists", "deep objects"):
            assert "prompt" in json.loads(body.build())


def test_bodies_at_their_limits_and_of_crowds_are_valid_json() -> None:
    assert {"logit_bias", "allowed_token_ids", "bad_words", "messages"} <= {body.field for body in limits("m", SIZE)}
    assert all(json.loads(body.build())["model"] == "m" for body in (*limits("m", SIZE), *crowds("m")))


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (httpx.Response(503, text="loading"), "loading"),
        (httpx.Response(200, text='data: {"error": {"message": "it broke"}}\n\n'), "it broke"),
    ],
    ids=["refused", "broken off"],
)
def test_short_requests_that_fail_are_faults(response: httpx.Response, fault: str) -> None:
    @contextmanager
    def stream(*_: Any, **__: Any) -> Iterator[httpx.Response]:
        yield response

    with instead(httpx, "stream", stream), pytest.raises(RuntimeError, match=fault):
        short_request("http://nowhere", {}, leaves=False)


def test_neighbour_reports_gaps_since_its_last_report() -> None:
    seen = _Seen()
    seen.gaps_s = [0.001] * 98 + [0.1, 0.5]
    assert seen.take() == pytest.approx(
        {"chunks": 100, "p50_ms": 1, "p99_ms": 100, "longest_gap_ms": 500, "longest_health_ms": 0}
    )
    assert seen.take()["chunks"] == 0


@pytest.mark.slow
def test_a_daemon_is_disturbed_during_a_stream(tmp_path: Path) -> None:
    """Each row has the statuses of all its requests and what the neighbour saw meanwhile."""
    pair, pool = write_pair(tmp_path), Daemons(tmp_path)
    words = (str(pair.target), "--draft-model", str(pair.draft), "--num-threads", "1", "--no-calibrate")
    daemon = pool.get(*words, "--served-model-name", "tiny")
    options = argparse.Namespace(
        max_request_bytes=SIZE, fields="stop", seconds=0.5, rate=100.0, requests=40, serve_args=""
    )
    with neighbour_of(daemon.url, "tiny") as neighbour:
        target = Target(daemon.url, "tiny", neighbour, options)
        names = ("bodies", "malformed", "grammars", "soak", "prompt")
        rows = {name: list(DISTURBANCES[name](target)) for name in names}
        rows["crowds"] = list(disturb_with_crowds(target, sizes=(3,)))
    pool.stop()
    assert {status for row in rows["bodies"] for status in row["statuses"]} <= {"200", "400"}
    assert {row["at_once"] for row in rows["bodies"]} == {1, 20}
    assert set(rows["malformed"][0]["statuses"]) <= {"400", "404"}
    assert rows["grammars"][0]["faults"] == []
    assert len(rows["soak"]) == 20
    assert {status for row in rows["soak"] for status in row["statuses"]} <= {"200", "left"}
    assert all(sum(row["statuses"].values()) == 3 for row in rows["crowds"])
    every = [row for found in rows.values() for row in found]
    assert all(row["neighbour"]["longest_health_ms"] > 0 for row in rows["crowds"])
    assert len(markdown(every).splitlines()) == 2 + len(every)


def test_failures_are_the_exit_code(tmp_path: Path) -> None:
    @contextmanager
    def daemon(*_: Any) -> Iterator[str]:
        yield "http://daemon"

    def measured(statuses: dict[str, int]) -> int:
        seen = {"longest_gap_ms": 1.0, "longest_health_ms": 1.0}
        row = {"name": "soak", "statuses": statuses, "answer_s": 1.0, "neighbour": seen}
        with (
            instead(pressure, "running_daemon", daemon),
            instead(pressure, "measure", lambda *_: {"rows": [row]}),
            instead(pressure, "metric", lambda *_: 0.0),
        ):
            return pressure.main(["soak", "--output", str(tmp_path / "soak.json")])

    assert measured({"200": 3, "left": 1}) == 0
    assert measured({"200": 3, "RuntimeError: broke": 1}) == 1
    assert json.loads((tmp_path / "soak.json").read_text())["blocks_held_at_idle"] == 0
