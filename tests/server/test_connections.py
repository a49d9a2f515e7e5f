"""Connections that send too much, too slowly or nothing, and clients that still send while they are refused."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.daemon_process import MODEL, ROOT, Daemon, Daemons, wait_until

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: here\r\n"
JSON = b"content-type: application/json\r\n"
CALL = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1}).encode()
LARGE_BYTES = 64 << 20
MOST_CONNECTIONS = 8


def connected(daemon: Daemon) -> socket.socket:
    """A connection that is read with patience."""
    return socket.create_connection(("127.0.0.1", daemon.port), timeout=60)


def answered(connection: socket.socket) -> bytes:
    """Everything until the daemon closes the connection."""
    read = b""
    while piece := connection.recv(1 << 16):
        read += piece
    return read


def status_of(daemon: Daemon, pieces: Iterator[bytes]) -> int:
    """The status of the answer to these bytes, which are sent until the daemon answers."""
    with connected(daemon) as connection:
        connection.setblocking(False)
        answer = b""
        for piece in pieces:
            connection.setblocking(True)
            connection.sendall(piece)
            connection.setblocking(False)
            try:
                answer = connection.recv(1 << 16)
            except BlockingIOError:
                continue
            break
        if not answer:
            connection.settimeout(60)
            answer = connection.recv(1 << 16)
    body = answer.partition(b"\r\n\r\n")[2]
    if body:
        assert json.loads(body)["error"]["message"]
    return int(answer.split()[1])


def repeated(first: bytes, piece: bytes, most_bytes: int = 8 << 20) -> Iterator[bytes]:
    """Bytes without an end, but for a bound that no refusal needs."""
    yield first
    for _ in range(most_bytes // len(piece)):
        yield piece


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (LINE + b"x: ", b"a" * 16384),
        (LINE, b"a" * 16384),
        (b"POST /", b"a" * 16384),
        (LINE, b"".join(b"x: %d\r\n" % number for number in range(4096))),
        (LINE + b"transfer-encoding: chunked\r\n\r\n1;x=", b"a" * 16384),
        (LINE + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ", b"a" * 16384),
        (LINE + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"x: y\r\n" * 4096),
        (b"", b"\r\n" * 8192),
    ],
    ids=["value", "name", "address", "headers", "chunk extension", "trailer", "trailers", "empty lines"],
)
def test_what_surrounds_a_body_is_bounded(daemon: Daemon, first: bytes, piece: bytes) -> None:
    """431 before 8 MB have come, wherever the bytes stand."""
    assert status_of(daemon, repeated(first, piece)) == 431
    with daemon.client() as client:
        assert client.get("/health").status_code == 200


def test_heads_and_chunks_below_the_bound_are_served(daemon: Daemon) -> None:
    """60 kB of headers, and a body in chunks of one byte."""
    with daemon.client() as client:
        headers = {"content-type": "application/json", "x-long": "a" * 60_000}
        assert client.post("/v1/completions", content=CALL, headers=headers).status_code == 200
        padded = CALL[:-1] + b" " * 20_000 + b"}"
        assert len(padded) > 20_000
        single = (padded[number : number + 1] for number in range(len(padded)))
        answer = client.post("/v1/completions", content=single, headers={"content-type": "application/json"})
        assert answer.status_code == 200


def test_requests_on_one_connection_are_counted_apart(daemon: Daemon) -> None:
    """Many requests, also sent at once, may have more bytes of headers together than one may."""
    one = b"GET /version HTTP/1.1\r\nhost: here\r\nx: " + b"a" * 5000 + b"\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with connected(daemon) as connection:
        connection.sendall(one * 50 + last)
        assert answered(connection).count(b"HTTP/1.1 200 OK") == 51


def test_requests_that_are_no_http_do_not_fill_the_log(daemon: Daemon) -> None:
    """400 in JSON each time, and one line a minute at most."""
    for _ in range(20):
        assert status_of(daemon, iter([b"nonsense\r\n\r\n"])) == 400
    assert daemon.log.count("Invalid HTTP request") == 1


def test_a_body_that_is_too_large_is_refused_readably(daemon: Daemon) -> None:
    """Clients that send 64 MB read 413 and no reset, with and without keep-alive, with and without a length."""
    body = b" " * LARGE_BYTES
    asked = urllib.request.Request(f"{daemon.url}/v1/completions", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=60)
    with refused.value as answer:
        assert answer.code == 413
        assert json.load(answer)["error"]["code"] == "request_too_large"
    for has_length in (True, False):
        for header in ({}, {"connection": "close"}):
            content: Any = body if has_length else (body[: 1 << 20] for _ in range(64))
            with daemon.client() as client:
                assert client.post("/v1/completions", content=content, headers=header).status_code == 413
    with (
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.APIStatusError) as error,
    ):
        client.completions.create(model=MODEL, prompt=body.decode())
    assert error.value.status_code == 413


@pytest.fixture
def guarded(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon that holds few connections, and those for a second."""
    few = ["--max-connections", str(MOST_CONNECTIONS), "--receive-timeout", "1"]
    return daemons.get(*pair_arguments, "--no-calibrate", *few)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"POST /v1/comp", b"HTTP/1.1 408"),
        (LINE + b"x: y\r\n", b"HTTP/1.1 408"),
        (LINE + JSON + b"content-length: 100\r\n\r\n{", b"HTTP/1.1 408"),
        (LINE + JSON + b"content-length: 100000\r\n\r\n" + b" " * 80_000, b"HTTP/1.1 408"),
        (LINE + JSON + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"HTTP/1.1 408"),
    ],
    ids=["nothing", "address", "header", "body", "much of a body", "chunk"],
)
def test_a_request_that_does_not_end_is_closed(guarded: Daemon, sent: bytes, status: bytes) -> None:
    """Also where a byte comes now and then."""
    with connected(guarded) as connection:
        connection.sendall(sent)
        assert answered(connection).startswith(status)


def test_dripping_bytes_do_not_hold_a_connection(guarded: Daemon) -> None:
    """The time counts from a request's beginning, also for the second request of a connection."""
    with connected(guarded) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: here\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200")
        connection.settimeout(0.1)
        for _ in range(600):
            connection.sendall(b"\r\n")
            try:
                answer = connection.recv(1 << 16)
            except TimeoutError:
                continue
            break
        assert answer.startswith(b"HTTP/1.1 408")


def test_an_answer_may_take_longer_than_its_request_might(guarded: Daemon) -> None:
    """A stream outlasts the time for requests, and so does an idle connection between two of them."""
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 1900, "n": 2, "ignore_eos": True, "stream": True}
    with guarded.client() as client:
        started = time.monotonic()
        with client.stream("POST", "/v1/completions", json=asked) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    time.sleep(0.005)
            assert line == ""
        assert time.monotonic() - started > 1
        assert client.get("/health").status_code == 200
        address = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        time.sleep(1.5)
        again = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        assert address == again


def test_silent_connections_make_room_for_those_that_ask(guarded: Daemon) -> None:
    """Five times as many silent connections as there may be: each new one replaces the one that has waited longest."""
    silent = [connected(guarded) for _ in range(5 * MOST_CONNECTIONS)]
    with guarded.client() as client:
        assert client.get("/health").status_code == 200
    assert silent[0].recv(1) == b""
    for connection in silent:
        connection.close()
    assert "raise the limit of open files" in guarded.log


def test_more_answers_than_connections_are_refused(guarded: Daemon) -> None:
    """503 where every connection is being answered; they end whole."""
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    streams = [connected(guarded) for _ in range(MOST_CONNECTIONS)]
    for connection in streams:
        connection.sendall(LINE + JSON + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(1) == b"H"
    with connected(guarded) as refused:
        refused.sendall(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        assert refused.recv(1 << 16).startswith(b"HTTP/1.1 503")
    for connection in streams:
        assert b"[DONE]" in answered(connection)
        connection.close()
    with guarded.client() as client:
        wait_until(lambda: client.get("/load").json()["running"] == 0, "requests stay")


def test_the_limit_of_open_files_is_raised() -> None:
    """To the hard limit, some of it left for other files."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300));"
        "from server.daemon import raise_file_limit;"
        "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["204", "300", "300"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) != (300, 300)


def test_httpx_reuses_a_connection_after_a_refusal(daemon: Daemon) -> None:
    """What was discarded does not disturb the next request."""
    with daemon.client() as client:
        for _ in range(3):
            assert client.post("/v1/completions", content=b" " * (5 << 20)).status_code == 413
            assert client.get("/health").status_code == 200


def test_an_unread_half_request_gets_an_error_in_json(daemon: Daemon) -> None:
    """Errors below HTTP have the shape of all others."""
    with connected(daemon) as connection:
        connection.sendall(b"POST / HTTP/9.9\r\n\r\n")
        answer = httpx.Response(400, content=answered(connection).partition(b"\r\n\r\n")[2])
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
