"""The bounded queue, and what a daemon answers before it can serve."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon, wait_until
from tests.server.event_stream import open_stream
from tests.server.good_bodies import error_of

PATH = "/v1/completions"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}


def wait_until_idle(http: httpx.Client) -> None:
    """Wait until the daemon has noticed that the clients of earlier tests have left."""
    wait_until(lambda: http.get("/load").json()["server_load"] == 0, "the daemon stays busy")


def test_a_full_queue_refuses_with_retry_after(one_seat: Daemon, one_seat_http: httpx.Client) -> None:
    """With one seat and one place taken the next call gets 429."""
    wait_until_idle(one_seat_http)
    with (
        openai.OpenAI(base_url=f"{one_seat.url}/v1", api_key=KEYS[0], max_retries=0) as client,
        open_stream(one_seat_http, PATH, **LONG) as running,
    ):
        next(running)
        with open_stream(one_seat_http, PATH, **{**LONG, "max_tokens": 3}) as waiting:
            waiting.wait_for_comment()
            for stream in (False, True):
                response = one_seat_http.post(PATH, json={**LONG, "stream": stream})
                error = error_of(response, 429)
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                assert "--max-num-queued-reqs" in error["message"]
                assert int(response.headers["retry-after"]) > 0
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model=MODEL, prompt="x")
            assert one_seat_http.get("/load").json() == {"server_load": 2, "running": 1, "waiting": 1}
            running.response.close()
            assert waiting.read()[-1]["choices"][0]["finish_reason"] == "length"
            assert waiting.is_done


def test_a_waiting_stream_is_kept_alive_by_comments(one_seat_http: httpx.Client) -> None:
    """Once it runs, its stream has chunks as usual."""
    wait_until_idle(one_seat_http)
    call = {**LONG, "max_tokens": 20, "seed": 5}
    with open_stream(one_seat_http, PATH, **call) as undisturbed:
        expected = [chunk["choices"][0]["text"] for chunk in undisturbed.read()]
    with open_stream(one_seat_http, PATH, **LONG) as running:
        next(running)
        with open_stream(one_seat_http, PATH, **call) as waiting:
            for _ in range(3):
                waiting.wait_for_comment()
            assert set(waiting.comments) == {": keep-alive"}
            running.response.close()
            assert [chunk["choices"][0]["text"] for chunk in waiting.read()] == expected
    metrics = one_seat_http.post(PATH, json={**LONG, "max_tokens": 2}).json()["metrics"]
    assert metrics["queue_time_ms"] >= 0


def test_impossible_call_gets_no_retry_after(one_seat_http: httpx.Client) -> None:
    """More answers than seats and places together: 400, not 429."""
    wait_until_idle(one_seat_http)
    assert error_of(one_seat_http.post(PATH, json={**LONG, "n": 3}), 400)["param"] == "n"
    assert one_seat_http.post(PATH, json={**LONG, "n": 2, "max_tokens": 2}).status_code == 200


def test_a_loading_daemon_answers_at_once(one_seat: Daemon) -> None:
    """It is healthy but not ready, and refuses work with Retry-After."""
    seen = one_seat.while_loading
    assert seen["/health"].status == 200
    assert seen["/metrics"].status == 200
    for path in ("/ready", "/v1/models", "/v1/completions"):
        assert seen[path].status == 503
        assert int(seen[path].headers["retry-after"]) > 0
        assert "engine_unavailable" in seen[path].body
    assert "loading" in seen["/v1/completions"].body


def test_ready_daemon_reports_ready(one_seat_http: httpx.Client) -> None:
    """Once loaded, `/ready` and `/v1/models` are 200."""
    assert one_seat_http.get("/ready").status_code == 200
    assert one_seat_http.get("/v1/models").json()["data"][0]["id"] == MODEL
