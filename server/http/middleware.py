"""ASGI middleware: request ids, API keys, rates, body size, slow readers, error counting.

It is not based on Starlette's BaseHTTPMiddleware, which hides a client's
disconnect from the routes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api import log_fields
from server.http.error_responses import ANSWERING, PROTECTED, error_response
from server.http.hosts import HostCheck
from server.serving.metrics import ServerMetrics
from server.settings.groups import rates_of
from server.settings.settings import Serve
from server.wire.current_call import HttpCall, current_call
from server.wire.errors import ApiError, ErrorBody, http_error
from server.wire.ids import new_id

log = logging.getLogger("polydraft")

_OPERATION_PATHS = frozenset(
    ("/", "/health", "/ping", "/ready", "/metrics", "/version", "/load", "/dashboard", "/dashboard/state")
)
"""Routes that probes, scrapers and the live page poll; they are logged at debug level."""
_FILES_PATH = "/v1/files"
_FORM_BYTES = 1 << 16
"""Bytes of an upload besides its file."""
_MAX_REQUEST_ID = 128
# Names of clients go to the engine. The secret prevents guessing which key or address a name stands
# for.
_SECRET = os.urandom(16)


class RequestEnvelope:
    """Adds an x-request-id, checks key and size, counts errors, and answers crashes."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, settings: Serve) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = [key.encode() for key in settings.api_key]
        self._hosts = HostCheck(settings)
        self._max_body_bytes = settings.max_request_bytes
        self._max_upload_bytes = settings.max_request_bytes
        if settings.batch_folder:
            self._max_upload_bytes = settings.batch_max_file_bytes + _FORM_BYTES
        self._log_requests = settings.enable_log_requests
        self._send_timeout_s = settings.send_timeout or None
        self._rate_text = settings.rate_limit
        self._rate: RateLimit | None = None
        if settings.rate_limit:
            self._rate = RateLimit(rates_of(settings.rate_limit))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope.setdefault("state", {})
        request_id = headers.get("x-request-id", "")[:_MAX_REQUEST_ID] or new_id()
        path = scope["raw_path"].decode("latin-1")
        client = self._client_of(scope, headers)
        call = HttpCall(request_id, path, headers.get("traceparent"), client, headers.get("idempotency-key", ""))
        current_call.set(call)
        report = partial(self._report, scope, call, time.perf_counter())
        response = _SentResponse(call, send, self._send_timeout_s, report)
        refusal = self._refusal(scope, headers, call.client)
        if refusal is not None:
            scope["state"]["rejection"] = refusal.rejection
            await error_response(refusal, path)(scope, receive, response.send)
            return
        routed = scope
        if scope["method"] == "HEAD":
            # A HEAD is answered as GET; the HTTP server leaves out the body.
            routed = {**scope, "method": "GET"}
        try:
            await self._app(routed, self._limited(receive, self._most_bytes(scope)), response.send)
        except Exception as error:
            if response.is_unread:
                # Over TCP the system usually closes first (`listener.bind`). The server closes
                # the connection, because the answer is not complete.
                log.warning("a client does not read its answer", extra=log_fields(id=request_id, path=path))
                return
            if response.has_begun:
                raise
            log.exception("a request failed", extra=log_fields(id=request_id, path=path))
            await error_response(error, path)(scope, receive, response.send)

    def _report(self, scope: Scope, call: HttpCall, started: float, status: int) -> None:
        """Count the status of a response that begins, and log it unless a generation does."""
        if status >= 400 and scope["method"] == "POST":
            self._metrics.error(status, scope["state"].get("rejection"))
        if not self._log_requests or call.is_generation:
            return
        total_ms = round(1000 * (time.perf_counter() - started), 2)
        known = {name: value for name, value in call.refusal.items() if value is not None}
        fields = log_fields(id=call.request_id, path=call.path, status=status, total_ms=total_ms, **known)
        is_probe = _route_path(scope) in _OPERATION_PATHS
        level = logging.DEBUG if is_probe else logging.INFO
        log.log(level, "%s", scope["method"], extra=fields)

    def _refusal(self, scope: Scope, headers: Headers, client: str) -> ApiError | None:
        """Return the error for a request that is refused by its head."""
        if (refusal := self._hosts.refusal(headers)) is not None:
            return refusal
        if not self._is_allowed(_route_path(scope), headers):
            return http_error(401, "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > (most_bytes := self._most_bytes(scope)):
            return http_error(413, _size_message(most_bytes))
        if (coding := headers.get("content-encoding", "").strip()).lower() not in ("", "identity"):
            message = f"bodies with Content-Encoding {coding!r} are not read; send it uncompressed"
            return http_error(415, message, {"Accept-Encoding": "identity"})
        return self._too_many(scope, client)

    def _is_allowed(self, path: str, headers: Headers) -> bool:
        if not self._keys or not path.startswith(PROTECTED):
            return True
        given = key_of(headers).encode("latin-1")
        # All keys are compared, each in constant time.
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0

    def _client_of(self, scope: Scope, headers: Headers) -> str:
        """Return an opaque name of a client, from its key, or else its address."""
        if self._keys:
            return opaque(key_of(headers))
        address = scope.get("client") or ("",)
        return opaque(str(address[0]))

    def _too_many(self, scope: Scope, client: str) -> ApiError | None:
        """Return the error for a client that asks too often."""
        if self._rate is None or scope["method"] != "POST" or not _route_path(scope).startswith(ANSWERING):
            return None
        wait_s = self._rate.take(client)
        if wait_s is None:
            return None
        message = f"more requests than {self._rate_text}; try again in {wait_s} s"
        body = ErrorBody(message, "rate_limit_error", code="rate_limited")
        return ApiError(429, body, {"retry-after": str(wait_s)}, "rate_limited")

    def _most_bytes(self, scope: Scope) -> int:
        """Return the size of the largest body that the route takes."""
        if _route_path(scope) == _FILES_PATH:
            return self._max_upload_bytes
        return self._max_body_bytes

    def _limited(self, receive: Receive, most_bytes: int) -> Receive:
        """Return a `receive` that raises an error when a body of unknown length grows too large."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > most_bytes:
                    # While the framework reads a body, it lets only its own type of error through.
                    raise HTTPException(413, _size_message(most_bytes))
            return message

        return limited


class _SentResponse:
    """Response of one request, with its id and the names of ignored fields in headers."""

    def __init__(self, call: HttpCall, send: Send, timeout_s: float | None, on_start: Callable[[int], None]) -> None:
        """timeout_s: for a client to read a part, or None. on_start: takes the status."""
        self.has_begun = False
        self.is_unread = False
        """Whether the client has read nothing for too long."""
        self._call = call
        self._send = send
        self._timeout_s = timeout_s
        self._on_start = on_start

    async def send(self, message: Message) -> None:
        """Send a part of the response; raises TimeoutError if the client reads nothing."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._call.request_id
            if self._call.ignored:
                headers["x-polydraft-ignored-fields"] = ", ".join(self._call.ignored)
            self._on_start(int(message["status"]))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            self.is_unread = True
            raise


class RateLimit:
    """Limit of requests per client over sliding windows."""

    def __init__(self, rates: Sequence[tuple[int, float]]) -> None:
        """rates: (requests, seconds); all of them apply."""
        self._rates = rates
        self._most = max(count for count, _ in rates)
        self._longest_s = max(window_s for _, window_s in rates)
        self._times_of: OrderedDict[str, deque[float]] = OrderedDict()
        """Recent requests of each client, in the order of the latest one."""

    def take(self, client: str) -> int | None:
        """Count a request; return None if it is admitted, else the seconds until one may be."""
        now = time.monotonic()
        while self._times_of and next(iter(self._times_of.values()))[-1] <= now - self._longest_s:
            self._times_of.popitem(last=False)
        times = self._times_of.get(client, deque(maxlen=self._most))
        wait_s = 0.0
        for count, window_s in self._rates:
            if len(times) >= count:
                wait_s = max(wait_s, times[-count] + window_s - now)
        if wait_s > 0:
            return math.ceil(wait_s)
        times.append(now)
        self._times_of[client] = times
        self._times_of.move_to_end(client)
        return None


def _size_message(most_bytes: int) -> str:
    return f"the body is larger than {most_bytes} bytes"


def opaque(client: str) -> str:
    """Return a name for a key or address that differs at each start and reveals nothing."""
    return hashlib.blake2b(client.encode("latin-1", "replace"), key=_SECRET, digest_size=8).hexdigest()


def key_of(headers: Headers) -> str:
    """Return the key of a request, from OpenAI's header or from Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "")


def _route_path(scope: Scope) -> str:
    """Return the path that routes match: without the prefix of a proxy that does not strip it."""
    path = str(scope["path"])
    root_path = str(scope.get("root_path", ""))
    if root_path and path.startswith(f"{root_path}/"):
        return path.removeprefix(root_path)
    return path
