"""Ends of a daemon: a drain, an abort, the death of its engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon, Daemons, wait_until
from tests.server.event_stream import EventStream, open_stream
from tests.server.good_bodies import error_of

PATH = "/v1/completions"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True}


def error_at_the_end(stream: EventStream) -> dict[str, Any]:
    """The error that ends a stream, which must be followed by `[DONE]`."""
    error: dict[str, Any] = stream.read()[-1]["error"]
    assert stream.is_done
    assert set(error) == {"message", "type", "param", "code"}
    return error


def is_gone(pid: int) -> bool:
    """Whether there is no such process (any more)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.sole("a drain under load")
def test_sigterm_drains_what_is_open_and_exits_0(one_seat: Daemon) -> None:
    """Open streams and slow answers end whole; new work is refused; exit code 0.

    Each answer ends its connection, and a request whose body never comes holds nothing up. The
    engine has long been done with the slow answer. Then the daemon exits 0.
    """
    engine = one_seat.engine_pid()
    with one_seat.client(KEYS[0]) as client, slow_reader(one_seat) as slow, half_request(one_seat) as half:
        begun = slow.recv(100)  # it comes whole, so the engine is done
        call = {**LONG, "max_tokens": 600, "stream_options": {"include_usage": True}}
        with open_stream(client, PATH, **call) as stream:
            next(stream)
            one_seat.terminate()
            wait_until(lambda: client.get("/ready").status_code == 503, "the daemon stays ready")
            refused = client.post(PATH, json=LONG)
            error = error_of(refused, 503)
            assert "shutting down" in error["message"]
            assert int(refused.headers["retry-after"]) > 0
            health = client.get("/health")
            assert health.status_code == 200
            assert refused.headers["connection"] == health.headers["connection"] == "close"
            assert stream.read()[-1]["usage"]["completion_tokens"] == 600
            assert stream.is_done
        answer = half.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shutting down" in answer
        found = read_late(slow, begun)
    assert json.loads(found)["usage"]["completion_tokens"] == 600
    assert one_seat.exit_code() == 0
    wait_until(lambda: is_gone(engine), "the engine outlives its daemon")


@contextlib.contextmanager
def half_request(daemon: Daemon) -> Iterator[socket.socket]:
    """A connection with a request whose body does not come."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[0]}\r\n"
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=60) as connection:
        connection.sendall(f"{head}content-length: 9\r\n\r\n{{".encode())
        yield connection


@contextlib.contextmanager
def slow_reader(daemon: Daemon) -> Iterator[socket.socket]:
    """A connection with little room that has asked for a long answer."""
    body = json.dumps(LONG | {"max_tokens": 600, "logprobs": 20, "temperature": 0}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[0]}\r\n"
    head += "content-type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Of large segments the daemon's system would take the whole answer.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        connection.connect(("127.0.0.1", daemon.port))
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield connection


def read_late(connection: socket.socket, answer: bytes) -> bytes:
    """Return an answer that is read more than a second into the drain."""
    time.sleep(3)
    while True:
        head, _, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if body and length and len(body) == int(length[1]):
            return body
        chunk = connection.recv(1 << 16)
        assert chunk, "the answer is cut off"
        answer += chunk


@pytest.mark.slow
def test_a_second_sigterm_aborts_open_streams(daemon: Daemon) -> None:
    """A stream ends with an error and `[DONE]`, a whole answer with 503."""
    engine = daemon.engine_pid()
    with ThreadPoolExecutor() as threads, daemon.client() as client:
        whole = threads.submit(client.post, PATH, json=LONG)
        with open_stream(client, PATH, **LONG) as stream:
            next(stream)
            wait_until(lambda: client.get("/load").json()["running"] == 2, "the calls do not start")
            daemon.terminate()
            wait_until(lambda: client.get("/ready").status_code == 503, "the daemon stays ready")
            daemon.terminate()
            error = error_at_the_end(stream)
        assert error["type"] == "service_unavailable"
        error_of(whole.result(), 503)
    assert daemon.exit_code() == 0
    wait_until(lambda: is_gone(engine), "the engine outlives its daemon")


@pytest.mark.sole("an engine that dies")
def test_the_death_of_the_engine_ends_everything_and_exits_1(daemon: Daemon) -> None:
    """Streams get an error and `[DONE]`, whole answers and `/health` 503; exit code 1."""

    def last_health() -> int | None:
        """Return the status of `/health` once it is no longer 200; None if nothing listens."""
        with daemon.client() as client:
            while True:
                try:
                    status = client.get("/health").status_code
                except httpx.TransportError:
                    return None
                if status != 200:
                    return status

    errors_before = daemon.log.count("ERROR")
    with ThreadPoolExecutor() as threads, daemon.client() as client:
        whole = threads.submit(client.post, PATH, json=LONG)
        with open_stream(client, PATH, **LONG) as stream:
            next(stream)
            wait_until(lambda: client.get("/load").json()["running"] == 2, "the calls do not start")
            health = threads.submit(last_health)
            os.kill(daemon.engine_pid(), signal.SIGKILL)
            error = error_at_the_end(stream)
        assert error["type"] == "service_unavailable"
        assert error["code"] == "engine_unavailable"
        error_of(whole.result(), 503)
        assert health.result() in (503, None)
    assert daemon.exit_code() == 1
    assert daemon.log.count("ERROR") == errors_before + 1
    assert "the engine process ended unexpectedly" in daemon.log


@pytest.mark.slow
def test_sigterm_while_loading_exits_0_at_once(daemons: Daemons, pair_arguments: list[str]) -> None:
    """A daemon that still loads its model stops as well, and takes its engine with it."""
    loading = daemons.start(*pair_arguments)
    with loading.client() as client:
        wait_until(lambda: loading.listens(client), "the daemon does not listen")
    engine = loading.engine_pid()
    loading.terminate()
    assert loading.exit_code() == 0
    wait_until(lambda: is_gone(engine), "the engine outlives its daemon")
    assert "serving" not in loading.log
