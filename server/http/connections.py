"""Bounds of connections: their number, the bytes outside bodies, and the time to send a request.

Not for: contents of requests (`middleware.py`, `bodies.py`), or clients that
do not read (`--send-timeout`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from engine.api import EngineStopped
from server.wire.errors import ApiError, ErrorEnvelope, http_error, to_api_error

log = logging.getLogger("polydraft.connections")

_MOST_HEAD_BYTES = 1 << 16
_BYTES_OF_A_HEADER = 32
"""Overhead that is counted for each header, as in HTTP/2."""
_CHUNK_ALLOWANCE = 8
"""Bytes of chunk framing allowed for each byte of a body."""
_LINGER_S = 2.0
_MOST_LINGERING = 16
_REST_OF_REQUEST_S = 1.0
"""Time that an incomplete request has after the drain has begun."""
_SHUTTING_DOWN = "the server is shutting down and accepts no new requests"
_LOG_INTERVAL_S = 60.0


class Seldom(logging.Filter):
    """Log filter that passes each warning once a minute, because clients trigger them."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; errors always are."""
        if record.levelno > logging.WARNING:
            return True
        now = time.monotonic()
        if now - self._passed_s.get(str(record.msg), -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
            return False
        self._passed_s[str(record.msg)] = now
        return True


class Waiting:
    """Connections without a complete request, oldest first, and the most open ones."""

    def __init__(self, most: int, receive_timeout_s: float, most_discarded_bytes: int = 256 << 20) -> None:
        """most_discarded_bytes: what a connection that closes may still send."""
        self.most = most
        self.most_discarded_bytes = most_discarded_bytes
        self.receive_timeout_s = receive_timeout_s
        self.is_draining = False
        """Whether connections close with their next response.

        Incomplete requests are refused then.
        """
        self.order: OrderedDict[Connection, None] = OrderedDict()

    def make_room(self, num_open: int) -> None:
        """Refuse the longest waiting connection, perhaps the new one, if there are too many.

        It gets a status even if it has sent nothing, because its request may be on the way, and if
        few do, time to send it: some clients read nothing after a write has failed.
        """
        if num_open <= self.most:
            return
        log.warning(
            "%d connections are open, the most that the limits allow: those that wait longest get 503; "
            "raise the limit of open files (ulimit -n) or --max-connections",
            num_open - 1,
        )
        longest = next(iter(self.order), None)
        if longest is None:
            return
        longest.refuse(http_error(503, "too many connections are open; try again soon", {"retry-after": "1"}))
        if num_open > self.most + min(self.most // 2, _MOST_LINGERING):
            longest.drop()


class _Transport:
    """Transport whose `close` waits for the rest of a body, so that a sender reads on."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self.raw = transport
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class _OfferParser:
    """Parser of requests that ignores offers of another protocol, as RFC 9110 allows (7.8).

    The library's parser ends with a head that has an offer, and skips the body. A new parser then
    reads this head again without the offer, and everything after it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = self._new()

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._connection)
        # Requests after one that asks to close the connection are ignored, not refused.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    @property
    def ignores_head(self) -> bool:
        """Whether the current head has an offer and will be read again."""
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse data; raise HttpParserError, or HttpParserUpgrade for the method CONNECT."""
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as end:
                if not self.ignores_head:
                    raise
                rest = rest[end.args[0] :]
                self._read_again()
            else:
                return

    def _read_again(self) -> None:
        """Read the current head without its offers; the routes still see them."""
        connection = self._connection
        start = b"%b %b HTTP/%b" % (self._parser.get_method(), connection.url, self._parser.get_http_version().encode())
        offers = [header for header in connection.headers if header[0] == b"upgrade"]
        others = [b"%b: %b" % header for header in connection.headers if header[0] != b"upgrade"]
        self._parser = self._new()
        self._parser.feed_data(b"\r\n".join([start, *others, b"", b""]))
        connection.headers += offers


class Connection(HttpToolsProtocol):
    """HTTP connection with bounds."""

    def __init__(self, waiting: Waiting, **options: Any) -> None:
        super().__init__(**options)
        self.parser: _OfferParser = _OfferParser(self)  # type: ignore[assignment]
        self._waiting = waiting
        self._deadline: asyncio.TimerHandle | None = None
        self._allowed_bytes = _MOST_HEAD_BYTES
        """Bytes outside bodies that this request may still send."""
        self._head_bytes = 0
        self._discarded_bytes = 0
        self._is_in_message = False
        self._is_in_body = False
        self._is_closing = False
        self._is_refused = False
        self._is_out_of_memory = False
        self._is_hurried = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        super().connection_made(transport)
        self._raw_transport = transport
        self.transport = cast(asyncio.Transport, _Transport(transport, self))
        self._waiting.order[self] = None
        self._arm(self._waiting.receive_timeout_s)
        self._waiting.make_room(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._is_in_body = False
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count and parse data; data after a refusal is discarded."""
        if self._is_refused:
            self._discard(len(data))
            return
        if self._deadline is None and self in self._waiting.order:
            self._arm(self._waiting.receive_timeout_s)
        self._allowed_bytes -= len(data)
        super().data_received(data)
        if self._is_refused:
            return
        if self._allowed_bytes < 0:
            self._refuse_head()
        elif self._waiting.is_draining:
            self.begin_drain()

    def begin_drain(self) -> None:
        """Close with the next response, and give an incomplete request little time."""
        for cycle in [self.cycle, *(cycle for cycle, _ in self.pipeline)]:
            if cycle is not None:
                cycle.keep_alive = False
        if self._is_in_message and not self._is_hurried:
            self._is_hurried = True
            self._arm(_REST_OF_REQUEST_S)

    def abandon(self) -> None:
        """Cut off a response that is not complete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._raw_transport.abort()

    def on_message_begin(self) -> None:
        """Count the bytes of a head, and its time if it came with an earlier request."""
        self._head_bytes = 0
        self._is_in_message = True
        if self._deadline is None:
            self._arm(self._waiting.receive_timeout_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a piece of the address."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer."""
        self._count_head(len(name) + len(value) + _BYTES_OF_A_HEADER)
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _MOST_HEAD_BYTES:
            raise ValueError("the head is too large")  # the parser turns it into its own error

    def on_headers_complete(self) -> None:
        """Start to receive a body."""
        if self.parser.ignores_head:
            return
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Allow the framing of the received data; discard data that arrives after the response."""
        self._allowed_bytes += (1 + _CHUNK_ALLOWANCE) * len(body)
        if self.cycle.response_complete:
            self._discard(len(body))
        try:
            super().on_body(body)
        except MemoryError:
            self._is_out_of_memory = True
            raise

    def on_message_complete(self) -> None:
        """Stop counting time and bytes: the request is complete."""
        if self.parser.ignores_head:
            return
        self._allowed_bytes = _MOST_HEAD_BYTES
        self._is_in_message = self._is_in_body = False
        self._stop_waiting()
        super().on_message_complete()
        if self._is_closing:
            self._raw_transport.close()
        elif self.cycle.response_complete:
            self._waiting.order[self] = None
            self._arm(self._waiting.receive_timeout_s)

    def on_response_complete(self) -> None:
        """Start to wait for the next request."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._waiting.order[self] = None
            self._waiting.order.move_to_end(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed."""
        if self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse_head()
        elif self._is_out_of_memory:
            self.refuse(to_api_error(MemoryError()))
        else:
            self.refuse(http_error(400, msg))

    def _refuse_head(self) -> None:
        self.refuse(http_error(431, f"address and headers are larger than {_MOST_HEAD_BYTES} bytes"))

    def refuse(self, error: ApiError) -> None:
        """Respond unless a response has begun, and close after time to read it."""
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if is_answering:
            self.drop()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # No client waits for its response any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._stop_waiting()
        body = msgspec.json.encode(ErrorEnvelope(error.body))
        more = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self._raw_transport.write(STATUS_LINE[error.status] + head + more + b"\r\n" + body)
        self._is_refused = True
        self.flow.resume_reading()
        self._arm(_LINGER_S)

    def close(self) -> None:
        """Close after the rest of a body: closing with unread bytes resets the connection."""
        self._is_closing = True
        if self._is_in_body:
            self.flow.resume_reading()
        else:
            self._raw_transport.close()

    def drop(self) -> None:
        """Close at once, after the client has read the sent bytes."""
        if self._raw_transport.get_write_buffer_size():
            self._raw_transport.close()
        else:
            self._raw_transport.abort()

    def _discard(self, size: int) -> None:
        self._discarded_bytes += size
        if self._discarded_bytes > self._waiting.most_discarded_bytes:
            self.drop()

    def _arm(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if seconds:
            self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _stop_waiting(self) -> None:
        self._waiting.order.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        has_begun = self._is_in_message or self._allowed_bytes < _MOST_HEAD_BYTES
        if self._is_refused or self._is_closing:
            self.drop()
        elif self._waits_for_an_answer:
            self._arm(self._waiting.receive_timeout_s)
        elif self._is_in_body and self.cycle.response_complete:
            self.drop()
        elif self._is_hurried:
            self.refuse(to_api_error(EngineStopped(_SHUTTING_DOWN)))
        elif has_begun:
            self.refuse(http_error(408, "the request did not come whole in time; see --receive-timeout"))
        else:
            self.drop()

    @property
    def _waits_for_an_answer(self) -> bool:
        """Whether an earlier request of this connection has no complete response yet."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        return bool(self.pipeline) or (is_answering and not self._is_in_body)
