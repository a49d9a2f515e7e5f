"""Clients that leave early: the work stops and its memory is free again."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.serving.answering import with_silences
from tests.server.daemon_process import MODEL, Daemon, wait_until
from tests.server.event_stream import open_stream

PATH = "/v1/completions"
# One token per step: 2000 steps, several seconds of work, when it is not cut short.
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once",
    "max_tokens": 2000,
    "ignore_eos": True,
    "speculation": {"enabled": False},
    "n": 8,
}
SHORT = {**LONG, "max_tokens": 1, "n": 1}


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """The value of a sample."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    (value,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return value


def num_steps(http: httpx.Client) -> float:
    """Steps the engine has made."""
    return metric(http, "polydraft_step_seconds_count", phase="target")


def is_busy(http: httpx.Client) -> bool:
    """Whether the engine runs the choices of `LONG`."""
    return (
        http.get("/load").json()["running"] == LONG["n"]
        and metric(http, "polydraft_num_requests_running") == LONG["n"]
        and metric(http, "polydraft_kv_cache_usage_ratio") > 0
    )


def is_idle(http: httpx.Client) -> bool:
    """Whether nothing runs, waits or holds blocks, by all accounts."""
    return (
        set(http.get("/load").json().values()) == {0}
        and metric(http, "polydraft_num_requests_running") == 0
        and metric(http, "polydraft_num_requests_waiting") == 0
        and metric(http, "polydraft_kv_cache_usage_ratio") == 0
    )


def check_aborted(http: httpx.Client, num_steps_before: float) -> None:
    """Assert that the long call was aborted, and that its blocks are free."""
    wait_until(lambda: http.get("/load").json()["server_load"] == 0, "the call of a client that left stays open")
    wait_until(lambda: is_idle(http), "blocks or seats of a client that left stay taken")
    assert num_steps(http) - num_steps_before < LONG["max_tokens"]


@pytest.mark.slow
def test_leaving_a_stream_frees_its_blocks(http: httpx.Client) -> None:
    """A stream that is closed after a few chunks stops running."""
    before = num_steps(http)
    with open_stream(http, PATH, **LONG) as stream:
        for _ in range(5):
            next(stream)
        wait_until(lambda: is_busy(http), "the call does not start")
    check_aborted(http, before)


def test_leaving_a_whole_answer_frees_its_blocks(daemon: Daemon, http: httpx.Client) -> None:
    """A call for a whole answer whose socket is closed stops running and gives its blocks back."""
    before = num_steps(http)
    body = json.dumps(LONG).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.port)) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: is_busy(http), "the call does not start")
    check_aborted(http, before)


@pytest.mark.slow
def test_abandoned_engine_reports_idle(http: httpx.Client) -> None:
    """The gauges fall to zero by themselves, without another request."""
    with open_stream(http, PATH, **LONG) as stream:
        next(stream)
        wait_until(lambda: is_busy(http), "the call does not start")
    wait_until(lambda: is_idle(http), "the gauges of an idle engine stay up")
    assert metric(http, "polydraft_request_success_total", finished_reason="abort") >= LONG["n"]


def test_a_finished_answer_leaves_nothing_behind(http: httpx.Client) -> None:
    """A stop string that ends an answer on the server's side ends it in the engine, too."""
    call = {**LONG, "n": 1, "seed": 3}
    text = http.post(PATH, json={**call, "max_tokens": 24}).json()["choices"][0]["text"]
    before = num_steps(http)
    answer = http.post(PATH, json={**call, "stop": text[20:30]}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    check_aborted(http, before)


def test_leaving_the_queue_makes_room(one_seat_http: httpx.Client) -> None:
    """A stream that leaves between two keep-alive comments gives its place back."""
    with open_stream(one_seat_http, PATH, **{**LONG, "n": 1}) as first:
        next(first)
        for _ in range(3):
            with open_stream(one_seat_http, PATH, **{**LONG, "n": 1}) as waiting:
                waiting.wait_for_comment()
            wait_until(lambda: one_seat_http.get("/load").json()["server_load"] == 1, "the place stays taken")
        assert not first.is_done
    assert one_seat_http.post(PATH, json=SHORT).status_code == 200


def test_an_error_behind_a_client_that_left_is_read() -> None:
    """The next step fails while a comment is being sent."""
    unread: list[Any] = []

    async def failing() -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.01)
        raise RuntimeError
        yield

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unread.append(what["message"]))
        paced = with_silences(failing(), 0.001)
        assert await anext(paced) is None
        await asyncio.sleep(0.05)
        await paced.aclose()
        del paced
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert unread == []
