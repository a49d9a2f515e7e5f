"""Pure ASGI middleware: request ids, keys, body size, error counting.

Pure, because Starlette's BaseHTTPMiddleware hides a client's disconnect from the handlers.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api import log_fields
from server.calls import Call, current_call
from server.errors import error_response, http_error
from server.metrics import ServerMetrics

log = logging.getLogger("polydraft")

_PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/dashboard/state")
_MAX_REQUEST_ID = 128


class RequestEnvelope:
    """Gives every answer an x-request-id, checks the key and the size, counts error answers, answers crashes."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        api_keys: Sequence[str],
        max_body_bytes: int,
        log_requests: bool,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")[:_MAX_REQUEST_ID] or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        call = Call(request_id, scope["raw_path"].decode("latin-1"), headers.get("traceparent"))
        current_call.set(call)
        started = time.perf_counter()
        has_begun = False

        async def send_marked(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                status = int(message["status"])
                if status >= 400 and scope["method"] == "POST":
                    self._metrics.error(status, scope["state"].get("rejection"))
                if self._log_requests and not call.is_generation:
                    total_ms = 1000 * (time.perf_counter() - started)
                    told = log_fields(id=request_id, path=call.path, status=status, total_ms=total_ms)
                    log.info("%s", scope["method"], extra=told)
            await send(message)

        if not self._is_allowed(_route_path(scope), headers):
            error = http_error(401, "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY")
            await error_response(error, call.path)(scope, receive, send_marked)
        elif self._is_too_large(headers):
            await error_response(http_error(413, self._size_message), call.path)(scope, receive, send_marked)
        else:
            try:
                await self._app(scope, self._limited(receive), send_marked)
            except Exception as error:
                if has_begun:
                    raise
                log.exception("a request failed", extra=log_fields(id=request_id, path=call.path))
                await error_response(error, call.path)(scope, receive, send_marked)

    def _is_allowed(self, path: str, headers: Headers) -> bool:
        if not self._keys or not path.startswith(_PROTECTED):
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = (key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode("latin-1")
        # All keys are compared, each in constant time.
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0

    def _is_too_large(self, headers: Headers) -> bool:
        length = headers.get("content-length", "")
        return length.isdigit() and int(length) > self._max_body_bytes

    @property
    def _size_message(self) -> str:
        return f"the body is larger than {self._max_body_bytes} bytes"

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that refuses a body without a length once it grows too large."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_bytes:
                    # The framework lets its own kind of error through where it reads the body, no other.
                    raise HTTPException(413, self._size_message)
            return message

        return limited


def _route_path(scope: Scope) -> str:
    """The path that routes are matched on: without the prefix of a proxy that does not strip it."""
    path, root_path = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root_path) :] if root_path and path.startswith(f"{root_path}/") else path
