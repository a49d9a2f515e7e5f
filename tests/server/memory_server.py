"""A daemon's connections in memory, on a clock that is set."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from server.http.connections import Connection, Waiting

TIMEOUT_S = 5.0
"""Time that a request has."""


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time can be moved on."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Wire(asyncio.Transport):
    """Both ends of a connection: what the server writes, and how it ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop, self.written, self.ended, self.is_read, self.num_unsent = loop, b"", "", True, 0
        self.connection: Connection

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self._end("closed")

    def abort(self) -> None:
        self._end("aborted")

    def _end(self, how: str) -> None:
        if not self.ended:
            self.ended = how
        if how == "aborted" or not self.num_unsent:
            self.num_unsent = 1  # once only
            self.loop.call_soon(self.connection.connection_lost, None)

    def is_closing(self) -> bool:
        return bool(self.ended)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    @property
    def statuses(self) -> list[int]:
        """Statuses of the answers so far."""
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]

    @property
    def error(self) -> dict[str, Any]:
        """The error of the only answer, which ends the connection."""
        assert self.written.count(b"HTTP/1.1 ") == 1
        head, _, body = self.written.partition(b"\r\n\r\n")
        assert b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body) in head
        return dict(json.loads(body)["error"])


class Server:
    """An application that reads a request and answers once it may."""

    def __init__(self, most: int = 100) -> None:
        self.loop = Clock()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.begins_first, self.reads = False, True
        self.received: list[str] = []
        self.scopes: list[Any] = []
        self.waiting = Waiting(most, TIMEOUT_S)
        self._state = ServerState()
        options: dict[str, Any] = {"interface": "asgi3", "ws": "none", "lifespan": "off", "timeout_keep_alive": 1000}
        self.config = uvicorn.Config(self.app, log_config=None, access_log=False, **options)
        self.config.load()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Read, wait, answer."""
        self.scopes.append(scope)
        body, more = b"", self.reads
        if self.begins_first:
            await self._begin(send)
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.received.append("left")
                return
            body, more = body + message["body"], message["more_body"]
        self.received.append(body.decode())
        await self.may_answer.wait()
        if not self.begins_first:
            await self._begin(send)
        await send({"type": "http.response.body", "body": b"ok"})

    async def _begin(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"", "more_body": True})

    def connect(self) -> Wire:
        wire = Wire(self.loop)
        options: dict[str, Any] = {"config": self.config, "server_state": self._state, "app_state": {}}
        wire.connection = Connection(self.waiting, **options, _loop=self.loop)
        wire.connection.connection_made(wire)
        self.pass_s(0)
        return wire

    def send(self, wire: Wire, *pieces: bytes) -> None:
        """Bytes from the client; none come once the connection has ended."""
        for piece in pieces:
            if not wire.ended:
                wire.connection.data_received(piece)
            self.pass_s(0)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and all that is due run."""
        self.loop.ahead_s += seconds

        async def turns() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())


LINGER_S = 2.0
GET = b"GET /a HTTP/1.1\r\n\r\n"
