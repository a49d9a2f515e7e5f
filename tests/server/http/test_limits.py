"""Limits of one caller: requests an hour, tokens of waiting prompts, seconds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import httpx
import pytest

from engine.api import DeadlineExceeded, Limits, Request, Sampling
from server.http.middleware import RateLimit, RequestEnvelope
from server.serving.answering import EventStream
from server.serving.metrics import ServerMetrics
from server.serving.ticket import Ticket
from server.settings.groups import rates_of
from server.settings.settings import Serve
from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, Daemon, Daemons, wait_until
from tests.server.event_stream import open_stream

LONG: dict[str, Any] = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 1500, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 2}


@pytest.fixture(scope="module")
@slow_fixture
def limited(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """One seat, two keys; three requests an hour a key, 100 waiting tokens, a second a request."""
    keys = ["--api-key", "first", "--api-key", "second", "--api-key", "third", "--api-key", "fourth"]
    limits = ["--rate-limit", "3/hour", "--max-num-queued-tokens", "100", "--request-timeout", "1"]
    return daemons.get(*pair_arguments, "--no-calibrate", "--max-num-seqs", "1", *keys, *limits, key="first")


def rejections(daemon: Daemon, reason: str) -> float:
    """Return the number of requests that were not admitted for this reason."""
    lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
    (line,) = [one for one in lines if one.startswith("polydraft_admission_rejections") and f'reason="{reason}"' in one]
    return float(line.split()[-1])


def test_rate_limit_per_key(limited: Daemon) -> None:
    """429 in the shape of the endpoint, with the time to wait."""
    with limited.client("second") as client:
        statuses = [client.post("/v1/completions", json=SHORT).status_code for _ in range(3)]
        refused = client.post("/v1/completions", json=SHORT)
        assert statuses == [200] * 3
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert 3000 < int(refused.headers["retry-after"]) <= 3600
        assert client.post("/infill", json={}).status_code == 429
        assert client.get("/v1/models").status_code == 200
    agent = anthropic.Anthropic(base_url=limited.url, api_key="second", max_retries=0)
    with agent, pytest.raises(anthropic.RateLimitError):
        agent.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "a"}])
    with limited.client("wrong") as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 401
    assert rejections(limited, "rate_limited") == 3


def test_request_timeout_ends_with_504(limited: Daemon) -> None:
    """Whole: 504. A stream: an error as its last event. The engine is free at once."""
    # Eight answers one after the other: seconds on any machine.
    slow = LONG | {"max_tokens": 1900, "n": 8, "speculation": {"enabled": False}}
    with limited.client("first") as client:
        whole = client.post("/v1/completions", json=slow)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded"), whole.text[:300]
        with open_stream(client, "/v1/completions", **slow) as stream:
            assert stream.read()[-1]["error"]["code"] == "deadline_exceeded"
            assert stream.is_done
        wait_until(lambda: client.get("/load").json()["running"] == 0, "the request goes on")


def test_a_prompt_beyond_the_waiting_tokens_is_refused(limited: Daemon) -> None:
    """Prompts of 40 tokens: one runs, two wait, the fourth is too many."""
    with limited.client("third") as client, open_stream(client, "/v1/completions", **LONG) as stream:
        next(stream)
        statuses: list[int] = []

        def ask(key: str) -> None:
            with limited.client(key) as other:
                statuses.append(other.post("/v1/completions", json=LONG).status_code)

        threads = [threading.Thread(target=ask, args=(key,)) for key in ("third", "third")]
        for thread in threads:
            thread.start()
        with limited.client("fourth") as other:
            wait_until(lambda: other.get("/load").json()["server_load"] == 3, "they do not wait")
            refused = other.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "80 prompt tokens wait" in refused.json()["error"]["message"]
    for thread in threads:
        thread.join()


def test_the_wait_for_a_grammar_counts() -> None:
    """A request whose grammar is being read has the same time as any."""
    sampling = Sampling(grammar="start: /a/")
    request = Request(request_id="0", prompt_token_ids=(1,), sampling=sampling, limits=Limits(max_tokens=1))

    async def wait() -> None:
        await Ticket([request], 0.01).grammars_ready()

    with pytest.raises(DeadlineExceeded):
        asyncio.run(wait())


def test_an_answer_ends_when_it_cannot_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    """Over a unix socket the daemon's own timer watches."""
    ended = []

    async def deltas() -> AsyncGenerator[Any, None]:
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            ended.append("generation")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        source = deltas()
        await EventStream((frame async for frame in source), source)(scope, receive, send)

    async def send(message: Any) -> None:
        if message.get("body"):
            await asyncio.Event().wait()

    async def receive() -> Any:
        return await asyncio.Event().wait()

    envelope = RequestEnvelope(app, ServerMetrics("m", compat=False), Serve(send_timeout=0.05))
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "raw_path": b"/v1/x", "headers": []}
    asyncio.run(envelope(scope, receive, send))
    assert ended == ["generation"]
    assert "a client does not read its answer" in caplog.text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_window_moves_with_time(clock: list[float]) -> None:
    """Two per second: the third waits, and each client has its own window."""
    rate = RateLimit([(2, 1.0)])
    assert [rate.take("a") for _ in range(3)] == [None, None, 1]
    assert rate.take("b") is None
    clock[0] += 0.5
    assert rate.take("b") is None
    clock[0] += 0.6
    assert [rate.take("b"), rate.take("b")] == [None, 1]
    assert rate.take("a") is None


def test_all_rates_hold(clock: list[float]) -> None:
    rate = RateLimit(rates_of("3/minute, 2/second"))
    assert [rate.take("a") for _ in range(3)] == [None, None, 1]
    clock[0] += 2
    assert [rate.take("a"), rate.take("a")] == [None, 58]


def test_callers_are_forgotten_when_their_windows_have_passed(clock: list[float]) -> None:
    rate = RateLimit([(1, 60.0)])
    for caller in range(1000):
        assert rate.take(str(caller)) is None
    clock[0] += 61
    assert rate.take("one more") is None
    assert len(rate._times_of) == 1


@pytest.mark.parametrize("text", ["often", "0/minute", "60/minute;5/second", "5", "-1/second"])
def test_malformed_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="60/minute"):
        Serve(rate_limit=text)
