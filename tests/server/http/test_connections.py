"""Connections that send too much, too slowly or nothing, clients that read nothing, or still send
while refused.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, ROOT, Daemon, Daemons, wait_until
from tests.server.event_stream import open_stream

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
JSON = b"content-type: application/json\r\n"
CALL = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 1}).encode()
LARGE_BYTES = 64 << 20
MOST_CONNECTIONS = 8
MOST_CALLS = 40


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
def test_bytes_around_a_body_are_bounded(daemon: Daemon, first: bytes, piece: bytes) -> None:
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_offers_of_other_protocols_are_ignored(daemon: Daemon, path: str, body: dict[str, Any]) -> None:
    """Every route reads the body behind an offer, with a length and in chunks, on one
    connection.
    """
    content = json.dumps({"model": MODEL, **body}).encode()
    for offered in ("h2c", "websocket"):
        offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": offered, "http2-settings": "AAEAAEAAAAIAAAAB"}
        with daemon.client() as client:
            for sent in (content, iter([content[:10], content[10:]])):
                answer = client.post(path, content=sent, headers={**offer, "content-type": "application/json"})
                assert answer.status_code == 200, answer.text


def test_requests_on_one_connection_are_counted_apart(daemon: Daemon) -> None:
    """Many requests, also sent at once, may have more bytes of headers together than one may."""
    one = b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 5000 + b"\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with connected(daemon) as connection:
        connection.sendall(one * 50 + last)
        assert answered(connection).count(b"HTTP/1.1 200 OK") == 51


def test_requests_that_are_no_http_do_not_fill_the_log(daemon: Daemon) -> None:
    """400 in JSON each time, and one line a minute at most."""
    for _ in range(20):
        assert status_of(daemon, iter([b"nonsense\r\n\r\n"])) == 400
    assert daemon.log.count("Invalid HTTP request") == 1


@pytest.mark.slow
def test_a_body_that_is_too_large_is_refused_readably(daemon: Daemon) -> None:
    """Clients that send 64 MB read 413 and no reset, with and without keep-alive, with and without
    a length.
    """
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
@slow_fixture
def guarded(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    """A daemon that holds few connections, waits a second for clients that send or read nothing,
    and limits rates.
    """
    few = ["--max-connections", str(MOST_CONNECTIONS), "--rate-limit", f"{MOST_CALLS}/hour", "--enable-log-requests"]
    return daemons.get(*pair_arguments, "--no-calibrate", *few, "--receive-timeout", "1", "--send-timeout", "1")


UNFINISHED = {
    "nothing": (b"", b""),
    "address": (b"POST /v1/comp", b"HTTP/1.1 408"),
    "header": (LINE + b"x: y\r\n", b"HTTP/1.1 408"),
    "body": (LINE + JSON + b"content-length: 100\r\n\r\n{", b"HTTP/1.1 408"),
    "much of a body": (LINE + JSON + b"content-length: 100000\r\n\r\n" + b" " * 80_000, b"HTTP/1.1 408"),
    "chunk": (LINE + JSON + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"HTTP/1.1 408"),
}


def test_requests_that_do_not_end_are_closed(guarded: Daemon) -> None:
    """All at once; one that sends nothing gets no answer."""
    assert len(UNFINISHED) < MOST_CONNECTIONS
    with ExitStack() as stack:
        connections = {name: stack.enter_context(connected(guarded)) for name in UNFINISHED}
        for name, (sent, _) in UNFINISHED.items():
            connections[name].sendall(sent)
        answers = {name: answered(connection) for name, connection in connections.items()}
    assert {name: answer[:12] for name, answer in answers.items()} == {
        n: status for n, (_, status) in UNFINISHED.items()
    }


def test_dripping_bytes_do_not_hold_a_connection(guarded: Daemon) -> None:
    """The time counts from a request's beginning, also for the second request of a connection."""
    with connected(guarded) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
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


def outlast(daemon: Daemon) -> None:
    """Wait until a request that begins now has had its time."""
    with connected(daemon) as unfinished:
        unfinished.sendall(LINE)
        assert answered(unfinished).startswith(b"HTTP/1.1 408")


@pytest.mark.slow  # test_connection_bounds.py has it on a clock that is set
def test_an_answer_may_take_longer_than_its_request_might(guarded: Daemon) -> None:
    """A stream outlasts the time for requests, and so does an idle connection between two of
    them.
    """
    engine = guarded.engine_pid()
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    with guarded.client() as client, open_stream(client, "/v1/completions", **asked) as stream:
        os.kill(engine, signal.SIGSTOP)
        try:
            outlast(guarded)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert stream.read()[-1]["choices"][0]["finish_reason"] == "length"
        assert stream.is_done
    with connected(guarded) as idle:
        for _ in range(2):
            idle.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += idle.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            outlast(guarded)


def test_each_of_too_many_requests_at_once_has_a_status(guarded: Daemon) -> None:
    """Five times as many connections as there may be come before the first is read. Each new one
    replaces the one that has waited longest.
    """
    guarded.process.send_signal(signal.SIGSTOP)
    try:
        asking = [connected(guarded) for _ in range(5 * MOST_CONNECTIONS)]
        for connection in asking:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    finally:
        guarded.process.send_signal(signal.SIGCONT)
    statuses = {connection.recv(1 << 16)[:12] for connection in asking}
    assert statuses <= {b"HTTP/1.1 200", b"HTTP/1.1 503"}
    for connection in asking:
        connection.close()
    assert "raise the limit of open files" in guarded.log


def test_a_start_that_may_open_too_few_files_says_what_to_raise() -> None:
    """Before the engine's process begins."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 40));"
        "from server.cli import main; sys.exit(main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "polydraft: 40 files may be open, and a start needs 48; raise the limit (ulimit -n)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "wanted", "expected", "warns"), [(300, 0, 249, False), (300, 100, 100, False), (60, 0, 28, True)]
)
def test_connections_leave_room_for_open_files(limit: int, wanted: int, expected: int, warns: bool) -> None:
    """The limit of files is raised to the hard limit. Too few connections are a warning."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (50, {limit}));"
        "import logging; logging.basicConfig(); from server import cli; from server.daemon import most_connections;"
        f"cli._raise_file_limit(); print(most_connections({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    most, soft, hard = map(int, done.stdout.split())
    assert expected - 8 < most <= expected
    assert (soft, hard) == (limit, limit)
    assert ("raise the limit of open files" in done.stderr) == warns


def test_httpx_reuses_a_connection_after_a_refusal(daemon: Daemon) -> None:
    """Discarded data does not disturb the next request."""
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


LONG: dict[str, Any] = {"model": MODEL, "prompt": list(range(5, 45)), "max_tokens": 1900, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 2}


@pytest.fixture
def deaf(guarded: Daemon) -> Iterator[socket.socket]:
    """A client that asks for megabytes and reads none."""
    more = {"stream": True, "return_token_ids": True, "logprobs": 20, "n": 4}
    body = json.dumps(LONG | more | {"speculation": {"return_drafts": True}})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", guarded.port))
        begin = "POST /v1/completions HTTP/1.1\r\nhost: localhost"
        head = f"{begin}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        client.sendall(f"{head}\r\nx-request-id: deaf\r\n\r\n{body}".encode())
        yield client


def is_connected(port: int, client: int) -> bool:
    """Whether the server's side has a socket, in any state, that is connected to a client's
    port.
    """
    ends = (f":{port:04X}", f":{client:04X}")
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any((local[-5:], other[-5:]) == ends for _, local, other, *_ in lines)


def test_client_that_reads_nothing_is_let_go(guarded: Daemon, deaf: socket.socket) -> None:
    """Its requests end early, its connection ends, others are answered meanwhile."""
    with guarded.client() as client:
        wait_until(lambda: client.get("/load").json()["server_load"] == 4, "the request does not begin")
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        wait_until(lambda: "finish_reason=abort,abort,abort,abort" in guarded.log, "it is not let go")
        wait_until(lambda: client.get("/load").json()["server_load"] == 0, "its requests stay")
        assert client.get("/dashboard/state").json()["num_requests"] == 0
    wait_until(lambda: not is_connected(guarded.port, deaf.getsockname()[1]), "its connection stays")


def test_a_header_is_no_other_address(guarded: Daemon) -> None:
    """Without keys a caller is its address, whatever it says of itself. The last test here: nothing
    more is let in.
    """
    with guarded.client() as client:
        asked = [client.post("/v1/completions", json=SHORT).status_code for _ in range(MOST_CALLS + 1)]
        assert asked[-1] == 429
        asked = [
            client.post("/v1/completions", json=SHORT, headers={"x-forwarded-for": f"10.0.0.{number}"}).status_code
            for number in range(3)
        ]
    assert asked == [429, 429, 429]


def test_the_daemon_listens_by_several_descriptors(daemon: Daemon) -> None:
    """libuv accepts one connection in a turn of the loop for each of them."""
    listening = [
        fields for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if (fields := line.split())[3] == "0A"
    ]
    (inode,) = [fields[9] for fields in listening if int(fields[1].rpartition(":")[2], 16) == daemon.port]
    links = [os.readlink(link) for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir()]
    assert links.count(f"socket:[{inode}]") >= 8
