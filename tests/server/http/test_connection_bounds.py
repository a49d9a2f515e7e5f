"""Bounds of a connection to the byte and the second, in memory and on a clock that is set.

`test_connections.py` has three of them on a daemon's sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server import daemon
from server.settings.settings import Serve
from tests.server.memory_server import GET, LINGER_S, TIMEOUT_S, Server
from tests.wrong import instead

HEAD_BYTES = 1 << 16
POST = b"POST /a HTTP/1.1\r\n"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    for task in asyncio.all_tasks(made.loop):
        task.cancel()
    made.pass_s(0)
    made.loop.close()


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET",
        b"GET /a HTTP/1.1\r\nx: y\r\n",
        POST + b"content-length: 3\r\n\r\n",
        POST + b"content-length: 3\r\n\r\nab",
    ],
)
def test_a_request_that_takes_too_long_gets_408(server: Server, begun: bytes) -> None:
    """One that has begun gets 408 and some time to read it; a silent connection just ends."""
    wire = server.connect()
    server.pass_s(TIMEOUT_S / 2)
    server.send(wire, begun)
    server.pass_s(TIMEOUT_S / 2 - 0.5)
    assert (wire.written, wire.ended) == (b"", "")
    server.pass_s(1)
    if not begun:
        assert (wire.written, wire.ended) == (b"", "aborted")
        return
    assert wire.statuses == [408]
    assert "--receive-timeout" in wire.error["message"]
    server.pass_s(LINGER_S - 0.5)
    assert wire.ended == ""
    server.pass_s(1)
    assert wire.ended == "aborted"
    assert wire.statuses == [408]


def test_an_answer_and_an_idle_connection_have_no_limit(server: Server) -> None:
    """The time begins again with the first byte of the next request."""
    wire = server.connect()
    server.may_answer.clear()
    server.send(wire, GET)
    server.pass_s(9 * TIMEOUT_S)
    assert (wire.written, wire.ended) == (b"", "")
    server.may_answer.set()
    server.pass_s(0)
    assert wire.statuses == [200]
    server.pass_s(0.9 * 5)
    server.send(wire, GET[:3])
    server.pass_s(TIMEOUT_S - 0.5)
    server.send(wire, GET[3:])
    assert wire.statuses == [200, 200]
    server.send(wire, GET[:3])
    server.pass_s(TIMEOUT_S - 0.5)
    server.send(wire, GET[3:5])
    assert wire.statuses == [200, 200]
    server.pass_s(1)
    assert wire.statuses == [200, 200, 408], "a further byte gives no further time"


def test_idle_connections_outlast_those_of_clients(server: Server) -> None:
    """Load balancers and pools keep idle connections longer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await server.app(scope, receive, send)

    settings = Serve(model="m", max_connections=9, receive_timeout=TIMEOUT_S)
    with instead(daemon, "build_app", lambda *_: app):
        server.config = daemon._uvicorn_config(cast(Any, SimpleNamespace(settings=settings)), cast(Any, None))
    wire = server.connect()
    server.send(wire, GET)
    server.pass_s(100)
    server.send(wire, GET)
    assert wire.statuses == [200, 200]
    assert wire.ended == ""
    server.pass_s(999)
    assert wire.ended == "closed"


def test_pipelined_request_waits_for_the_first_answer(server: Server) -> None:
    """Nobody reads it meanwhile, so its time does not run out."""
    wire = server.connect()
    server.may_answer.clear()
    server.send(wire, GET + GET + GET[:4])
    server.pass_s(3 * TIMEOUT_S)
    assert (wire.written, wire.ended) == (b"", "")
    server.may_answer.set()
    server.pass_s(0)
    server.send(wire, GET[4:])
    assert wire.statuses == [200, 200, 200]


@pytest.mark.parametrize("begun", [b"GET", POST + b"content-length: 9\r\n\r\nab"])
def test_pipelined_request_is_timed_after_the_first_answer(server: Server, begun: bytes) -> None:
    """Its client must not hold the connection afterwards."""
    wire = server.connect()
    server.may_answer.clear()
    server.send(wire, GET + begun)
    server.pass_s(3.5 * TIMEOUT_S)
    assert (wire.written, wire.ended) == (b"", "")
    server.may_answer.set()
    server.pass_s(0)
    assert wire.statuses == [200]
    server.pass_s(TIMEOUT_S + 1)
    assert wire.statuses == [200, 408]
    server.pass_s(LINGER_S + 1)
    assert wire.ended == "aborted"


def test_a_refusal_behind_requests_that_wait_ends_the_connection(server: Server) -> None:
    """They are not answered any more."""
    wire = server.connect()
    server.may_answer.clear()
    server.send(wire, GET + GET + b"nonsense\r\n\r\n")
    assert wire.statuses == [400]
    server.pass_s(LINGER_S + 1)
    assert wire.ended == "aborted"


def test_a_body_that_ends_behind_its_answer_leaves_the_connection_open(server: Server) -> None:
    """For the next request, which has its own time; it waits with the others meanwhile."""
    server.reads = False
    wire = server.connect()
    server.send(wire, POST + b"content-length: 9\r\n\r\nab", b"cdefghi")
    assert (wire.statuses, wire.ended) == ([200], "")
    assert list(server.waiting.order) == [wire.connection]
    server.pass_s(TIMEOUT_S - 1)
    server.send(wire, GET)
    assert wire.statuses == [200, 200]
    server.send(wire, POST + b"content-length: 9\r\n\r\nab", b"cdefghi")
    server.pass_s(TIMEOUT_S + 1)
    assert (wire.statuses, wire.ended) == ([200] * 3, "aborted")


def test_the_rest_of_a_body_has_its_time_too(server: Server) -> None:
    """After an answer that did not wait for it; nothing is written behind that answer."""
    server.reads = False
    wire = server.connect()
    server.send(wire, POST + b"connection: close\r\ncontent-length: 9\r\n\r\nab")
    assert (wire.statuses, wire.ended) == ([200], "")
    server.pass_s(TIMEOUT_S + 1)
    assert (wire.statuses, wire.ended) == ([200], "aborted")


def test_receive_timeout_zero_never_ends(server: Server) -> None:
    server.waiting.receive_timeout_s = 0
    wire = server.connect()
    server.send(wire, b"GET")
    server.pass_s(1000)
    assert (wire.written, wire.ended) == (b"", "")


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("num_headers", [1, 40])
def test_a_head_beyond_its_bytes_is_refused(server: Server, num_headers: int, over: bool) -> None:
    """Address, names and values, and 32 for each header."""
    wire = server.connect()
    room = HEAD_BYTES - len(b"/a") - 33 * num_headers
    lengths = [room // num_headers + (number < room % num_headers) for number in range(num_headers)]
    lengths[-1] += over
    head = POST + b"".join(b"x: %s\r\n" % (b"a" * length) for length in lengths)
    server.send(wire, head + b"\r\n")
    if not over:
        assert server.received == [""]
        server.send(wire, head + b"\r\n")
        assert server.received == ["", ""], "each request is counted by itself"
        return
    assert server.received == []
    assert wire.statuses == [431]
    assert str(HEAD_BYTES) in wire.error["message"]


def test_malformed_header_after_a_full_head_gets_400(server: Server) -> None:
    wire = server.connect()
    server.send(wire, POST + b"x: %s\r\n\0: a\r\n\r\n" % (b"a" * (HEAD_BYTES - len(b"/a") - 33)))
    assert wire.statuses == [400]


def test_the_application_gets_what_was_sent(server: Server) -> None:
    wire = server.connect()
    server.send(wire, b"GET /a%20b?c HTTP/1.1\r\nX-One: two\r\n\r\n")
    (scope,) = server.scopes
    assert (scope["method"], scope["path"], scope["query_string"]) == ("GET", "/a b", b"c")
    assert scope["headers"] == [(b"x-one", b"two")]
    assert wire.statuses == [200]


def test_a_long_address_is_counted(server: Server) -> None:
    wire = server.connect()
    server.send(wire, b"GET /" + b"a" * (HEAD_BYTES - 200), b"a" * 300 + b" HTTP/1.1\r\n")
    assert wire.statuses == [431]


@pytest.mark.parametrize("over", [False, True])
def test_bytes_before_a_request_are_counted(server: Server, over: bool) -> None:
    wire = server.connect()
    server.send(wire, b"\r\n" * (HEAD_BYTES // 2))
    assert wire.written == b""
    if over:
        server.send(wire, b"\r\n")
        assert wire.statuses == [431]


@pytest.mark.parametrize("over", [False, True])
def test_a_body_brings_room_for_its_chunks(server: Server, over: bool) -> None:
    """Nine bytes for each byte of data: itself, and eight of framing."""
    head, chunk = POST + b"transfer-encoding: chunked\r\n\r\n", b"64\r\n" + b"a" * 100 + b"\r\n"
    wire = server.connect()
    server.send(wire, head, chunk, b"1;")
    left = HEAD_BYTES - len(head) - len(chunk) + 9 * 100 - 2
    server.send(wire, b"x" * left)
    assert wire.written == b""
    if over:
        server.send(wire, b"x")
        assert wire.statuses == [431]
        assert server.received == ["left"], "the application is not left waiting"


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n1"


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (POST + b"x: ", b"a" * 16384),
        (POST, b"a" * 16384),
        (POST, b"x:\r\n" * 1300),
        (CHUNKED + b";x=", b"a" * 16384),
        (CHUNKED + b"\r\na\r\n0\r\nx: ", b"a" * 16384),
        (CHUNKED + b"\r\na\r\n0\r\n", b"x:\r\n" * 1300),
    ],
    ids=["value", "name", "headers", "chunk extension", "trailer", "trailers"],
)
def test_bytes_around_a_body_are_bounded(server: Server, first: bytes, piece: bytes) -> None:
    """Many short headers have few bytes, but each counts for more."""
    wire = server.connect()
    server.send(wire, first, *[piece] * 5)
    assert wire.statuses == [431]


def test_large_body_does_not_count_as_head(server: Server) -> None:
    wire = server.connect()
    server.send(wire, POST + b"content-length: 200000\r\n\r\n", *[b"a" * 50_000] * 4)
    assert server.received == ["a" * 200_000]
    assert wire.statuses == [200]


def test_malformed_http_gets_400_in_json(server: Server) -> None:
    wire = server.connect()
    server.send(wire, b"nonsense\r\n\r\n")
    assert wire.statuses == [400]
    assert (wire.error["type"], wire.error["message"]) == ("invalid_request_error", "Invalid HTTP request received.")
    server.send(wire, GET)
    assert wire.statuses == [400], "nothing more is read"


# -- closing ---------------------------------------------------------------------------------------


def test_data_after_a_refusal_is_discarded_up_to_a_bound(server: Server) -> None:
    server.waiting.most_discarded_bytes = 1000
    wire = server.connect()
    server.send(wire, b"nonsense\r\n\r\n", b"a" * 400, b"a" * 600)
    assert wire.ended == ""
    server.send(wire, b"a")
    assert wire.ended == "aborted"


def test_the_rest_of_a_body_is_read_before_the_connection_closes(server: Server) -> None:
    """A client that still sends would not read the answer."""
    server.waiting.most_discarded_bytes = 1000
    server.reads = False
    for size in (1000, 1001):
        wire = server.connect()
        server.may_answer.clear()
        server.send(wire, POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % size)
        wire.connection.flow.pause_reading()
        server.may_answer.set()
        server.pass_s(0)
        assert wire.statuses == [200]
        assert (wire.is_read, wire.ended) == (True, "")
        server.send(wire, b"a" * 999)
        assert wire.ended == ""
        server.send(wire, b"a" * (size - 999))
        assert wire.ended == ("closed" if size == 1000 else "aborted")


def test_a_connection_without_a_body_closes_at_once(server: Server) -> None:
    wire = server.connect()
    server.send(wire, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert (wire.statuses, wire.ended) == ([200], "closed")


def test_a_connection_that_closes_waits_for_no_request(server: Server) -> None:
    """Also while its client has not read all of the answer: it is not the one that makes room."""
    wire = server.connect()
    wire.num_unsent = 5
    server.send(wire, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert (wire.statuses, wire.ended) == ([200], "closed")
    assert not server.waiting.order


def test_an_answer_that_has_begun_is_cut_off_by_a_refusal(server: Server) -> None:
    """A second status would look like a part of the body. Unread bytes are still sent."""
    for num_unsent, ended in ((0, "aborted"), (5, "closed")):
        server.begins_first = True
        wire = server.connect()
        wire.num_unsent = num_unsent
        server.send(wire, POST + b"transfer-encoding: chunked\r\n\r\n", b"nonsense\r\n")
        assert wire.statuses == [200]
        assert wire.ended == ended


def test_refusal_keeps_reading_the_body(server: Server) -> None:
    """A client that sends first and reads afterwards must get through."""
    wire = server.connect()
    server.send(wire, POST + b"transfer-encoding: chunked\r\n\r\n")
    wire.connection.flow.pause_reading()
    server.send(wire, b"nonsense\r\n")
    assert wire.statuses == [400]
    assert wire.is_read


# -- offers of other protocols ---------------------------------------------------------------------

JDK = (
    b"Connection: Upgrade, HTTP2-Settings\r\n%bHost: localhost:8000\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\n\r\n"
)
SOCKET = b"connection: keep-alive\r\n%bUPGRADE: websocket\r\nUpgrade: h2c\r\nconnection: Upgrade\r\n\r\n"
LENGTH = b"Content-Length: 3\r\n", b"abc"
CHUNKS = b"Transfer-Encoding: chunked\r\n", b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\nUpgrade: h2c\r\n\r\n"


@pytest.mark.sampled
@pytest.mark.parametrize("offer", [JDK, SOCKET])
@pytest.mark.parametrize(("framing", "body"), [LENGTH, CHUNKS])
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_request_with_an_offer_is_read_like_any_other(
    server: Server, offer: bytes, framing: bytes, body: bytes, size: int
) -> None:
    """Many requests on one connection, in pieces of any size; offers are visible."""
    one = b"POST /a?b HTTP/1.1\r\n" + offer % framing + body
    sent = (one + GET + b"GET /c HTTP/1.1\r\n" + offer % b"") * 20
    wire = server.connect()
    server.send(wire, *(sent[begin : begin + size] for begin in range(0, len(sent), size)))
    for _ in range(60):
        server.pass_s(0)
    assert wire.statuses == [200] * 60
    assert server.received == ["abc", "", ""] * 20
    posted, plain, asked = server.scopes[-3:]
    assert (posted["method"], posted["path"], posted["query_string"]) == ("POST", "/a", b"b")
    offered = [value for name, value in posted["headers"] if name == b"upgrade"]
    trailer_offers = [b"h2c"] if framing is CHUNKS[0] else []
    assert offered == ([b"h2c"] if offer is JDK else [b"websocket", b"h2c"]) + trailer_offers
    assert b"upgrade" not in dict(plain["headers"])
    assert dict(asked["headers"])[b"upgrade"] == b"h2c"


@pytest.mark.parametrize("framing", [LENGTH[0], CHUNKS[0]])
def test_a_request_with_an_offer_has_the_bounds_of_any_other(server: Server, framing: bytes) -> None:
    """Its body has a time, its head a size."""
    slow, long = server.connect(), server.connect()
    server.send(slow, POST + JDK % framing)
    server.send(long, POST + b"x: " + b"a" * HEAD_BYTES + b"\r\n" + JDK % framing)
    server.pass_s(TIMEOUT_S + 1)
    assert (slow.statuses, long.statuses) == ([408], [431])


def test_a_tunnel_is_refused(server: Server) -> None:
    """CONNECT asks for another protocol without an offer that could be ignored."""
    wire = server.connect()
    server.send(wire, b"CONNECT there:443 HTTP/1.1\r\nhost: there:443\r\n\r\n")
    assert wire.statuses == [400]


# -- the drain -------------------------------------------------------------------------------------


def drain(server: Server, *wires: Any) -> None:
    """Begin to drain, as the daemon does."""
    server.waiting.is_draining = True
    for wire in wires:
        wire.connection.begin_drain()
    server.pass_s(0)


@pytest.mark.parametrize("begins_first", [False, True])
def test_each_answer_in_a_drain_closes_its_connection(server: Server, begins_first: bool) -> None:
    """One was idle, one waited for two answers, and one is new. Heads that have been sent stay."""
    idle, waiting = server.connect(), server.connect()
    server.send(idle, GET)
    server.may_answer.clear()
    server.begins_first = begins_first
    server.send(waiting, GET + GET)
    drain(server, idle, waiting)
    assert (idle.ended, waiting.ended) == ("", "")
    new = server.connect()
    server.send(new, GET)
    server.may_answer.set()
    server.send(idle, GET)
    assert (idle.statuses, waiting.statuses, new.statuses) == ([200, 200], [200, 200], [200])
    for wire in (idle, waiting, new):
        assert wire.written.count(b"connection: close") == 1
        assert wire.ended == "closed"


@pytest.mark.parametrize(
    "begun", [b"GET /a", POST + b"content-length: 9\r\n\r\n", POST + b"transfer-encoding: chunked\r\n\r\n3\r\na"]
)
@pytest.mark.parametrize("is_earlier", [True, False])
def test_an_incomplete_request_has_a_second_in_a_drain(server: Server, begun: bytes, is_earlier: bool) -> None:
    """If it had begun before, and if it begins later. Further bytes give no further time."""
    wire = server.connect()
    if is_earlier:
        server.send(wire, begun)
    drain(server, wire)
    if not is_earlier:
        server.send(wire, begun)
    server.pass_s(0.9)
    assert (wire.statuses, wire.ended) == ([], "")
    server.send(wire, b"1")
    server.pass_s(0.2)
    assert wire.statuses == [503]
    assert "shutting down" in wire.error["message"]
    assert b"retry-after: " in wire.written
    assert "left" in server.received or begun == b"GET /a"
    server.pass_s(LINGER_S + 0.5)
    assert wire.ended == "aborted"


def test_the_rest_of_a_request_is_served_in_a_drain(server: Server) -> None:
    """Clients send head and body in two pieces."""
    wire = server.connect()
    server.send(wire, POST + b"content-length: 2\r\n\r\n")
    drain(server, wire)
    server.send(wire, b"ab")
    assert (wire.statuses, wire.ended) == ([200], "closed")
    assert b"connection: close" in wire.written


def test_an_answer_that_is_not_read_is_cut_off_at_the_end(server: Server) -> None:
    """Its task ends by itself, so that none is cancelled; an idle connection is left alone."""
    wire, idle = server.connect(), server.connect()
    server.may_answer.clear()
    server.send(wire, GET)
    for connection in (wire.connection, idle.connection):
        connection.abandon()
    assert (wire.ended, idle.ended) == ("aborted", "")


# -- memory ----------------------------------------------------------------------------------------


def test_a_body_without_memory_gets_503(server: Server) -> None:
    def out_of_memory(right: Any, connection: Any, body: bytes) -> None:
        raise MemoryError

    wire = server.connect()
    with instead(HttpToolsProtocol, "on_body", out_of_memory):
        server.send(wire, POST + b"content-length: 2\r\n\r\nab")
    assert wire.statuses == [503]
    assert wire.error["code"] == "out_of_memory"
