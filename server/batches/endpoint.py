"""Answers the request of a line by the functions of the generating routes, without a network.

The application has the same routes as the daemon's, and no limits of clients: a line needs no key
and has no rate.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

import msgspec
from starlette.types import Message

from engine.api import RequestError, SpeculationConfig, log_fields
from server.batches.lines import LineRequest
from server.batches.objects import LineResponse
from server.http import error_responses
from server.http.openapi import Application
from server.openai import routes as generate_routes
from server.serving.engine_client import UNATTENDED
from server.state import Server
from server.wire.current_call import HttpCall, current_call
from server.wire.errors import http_error
from server.wire.ids import new_id

log = logging.getLogger("polydraft")

LINE_PRIORITY = 2 * UNATTENDED
"""Added to the priority of a line, so that all requests of interactive clients come before it."""
_MANY_LINES = 16
"""Lines at once from which on plain decoding is as fast as drafts, and its steps are shorter."""
_CHAIN = (1, 4)
"""Chains and tokens that fewer lines draft, on every device."""
NOT_NOW = (429, 503)
"""Statuses of an endpoint that is to be asked again later."""
_STREAM = "stream: the answer of a line is written whole; leave it out"


class _StreamField(msgspec.Struct):
    """Field of a body that lines must not set."""

    stream: Any = None


class _Received(NamedTuple):
    status: int
    body: bytes


def shape_of_lines(limits: SpeculationConfig, at_once: int) -> tuple[int, int]:
    """Return the shape of drafts of new lines, (0, 0) for none; at_once: lines that may run."""
    return limits.seed_shape or ((0, 0) if at_once >= _MANY_LINES else _CHAIN)


class LineEndpoint:
    """Endpoints of lines."""

    def __init__(self, server: Server) -> None:
        """Build the application; nothing is served yet."""
        self._most_bytes = server.settings.max_request_bytes
        self._app = Application()
        error_responses.install(self._app)
        self._app.include_router(generate_routes.build_router(server))

    async def answer(self, request: LineRequest, client: str, line_id: str, shape: tuple[int, int]) -> LineResponse:
        """Return the response of the endpoint. Cancelling it aborts the generation.

        client: opaque name; requests of the same client take turns with requests of other clients.
        line_id, shape: decide the answer of every attempt. Call it in a separate task: it sets the
        task's current call.
        """
        call = HttpCall(
            new_id(),
            request.url,
            client=client,
            attempt_of=line_id,
            shape=shape,
            added_priority=LINE_PRIORITY,
        )
        current_call.set(call)
        try:
            received = await self._received(request)
        finally:
            call.on_prompt.close()
        body = received.body
        if b"\n" in body:
            body = msgspec.json.format(body, indent=-1)
        return LineResponse(received.status, call.request_id, msgspec.Raw(body))

    async def _received(self, request: LineRequest) -> _Received:
        if len(request.body) > self._most_bytes:
            return _refused(http_error(413, f"the body is larger than {self._most_bytes} bytes"))
        if _streams(request.body):
            return _refused(RequestError(_STREAM, "stream", "unsupported_value"))
        return await self._call(request)

    async def _call(self, request: LineRequest) -> _Received:
        """Run the application as an HTTP server would, for one request."""
        status = 0
        parts: list[bytes] = []
        messages = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            # The line stays until its answer is there.
            await asyncio.Event().wait()
            raise AssertionError("the event is never set")

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            elif message["type"] == "http.response.body":
                parts.append(bytes(message.get("body", b"")))

        try:
            await self._app(_scope_of(request), receive, send)
        except Exception as error:
            log.exception("a line of a batch failed", extra=log_fields(path=request.url))
            return _refused(error)
        return _Received(status, b"".join(parts))


def _scope_of(request: LineRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(request.body))],
        "client": None,
        "server": None,
        "state": {},
    }


def _streams(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_StreamField).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the endpoint refuses it


def _refused(error: Exception) -> _Received:
    response = error_responses.error_response(error)
    return _Received(response.status_code, bytes(response.body))
