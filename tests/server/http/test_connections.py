"""Bounds of connections on a daemon's sockets; `test_connection_bounds.py` has them to the byte."""

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

import openai
import pytest

from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, ROOT, Daemon, Daemons, wait_until

LINE = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
JSON = b"content-type: application/json\r\n"
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


@pytest.mark.slow
def test_clients_read_413_while_they_still_send(daemon: Daemon) -> None:
    """64 MB, with and without keep-alive, with and without a length."""
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
    """A daemon with few connections, a second for slow clients, and rate limits."""
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


def test_unfinished_requests_get_408(guarded: Daemon) -> None:
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


def test_each_of_too_many_requests_at_once_has_a_status(guarded: Daemon) -> None:
    """Five times as many as there may be come before the first is read."""
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
    """Return whether the server has a socket, in any state, to a client's port."""
    ends = (f":{port:04X}", f":{client:04X}")
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any((local[-5:], other[-5:]) == ends for _, local, other, *_ in lines)


def test_slow_reader_is_disconnected(guarded: Daemon, deaf: socket.socket) -> None:
    """Its requests end early, its connection ends, others are answered meanwhile."""
    with guarded.client() as client:
        wait_until(lambda: client.get("/load").json()["server_load"] == 4, "the request does not begin")
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        wait_until(lambda: "finish_reason=abort,abort,abort,abort" in guarded.log, "it is not let go")
        wait_until(lambda: client.get("/load").json()["server_load"] == 0, "its requests stay")
        assert client.get("/dashboard/state").json()["num_requests"] == 0
    wait_until(lambda: not is_connected(guarded.port, deaf.getsockname()[1]), "its connection stays")


def test_rate_limits_ignore_forwarded_addresses(guarded: Daemon) -> None:
    """Without keys a caller is its address. The last test: nothing more is let in."""
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
