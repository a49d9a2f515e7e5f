"""Reads request bodies with bounds: counts values, decodes with msgspec, validates.

Decoding and validation hold the interpreter's lock, so a thread would not keep the event loop
responsive. The bounds keep each step short instead. All routes with a body use `BodyRoute`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Scope

from engine.api import RequestError
from server.http.body_queue import BodyQueues
from server.wire.current_call import this_call
from server.wire.limits import DEEPEST, MOST_OBJECTS, MOST_TEXTS, MOST_VALUES
from server.wire.nesting import is_deep, outside_strings, unescaped

_CURL_TYPE = "application/x-www-form-urlencoded"
"""Type that curl gives a body by default."""
_SMALL_BYTES = 1 << 11
"""Size up to which any body is read and validated in a fraction of a millisecond."""
_LARGE_BYTES = 1 << 16
"""Size above which a body's memory is returned to the system."""
_GONE_S = 1.0
"""Time after which the answer to a large body has usually been sent."""
_HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
"""Escape of half a character (a surrogate) without its other half."""


class BodyRoute(APIRoute):
    """Route that reads its body with bounds. FastAPI still validates and describes it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler in one that reads JSON with `read_json`."""
        handle = super().get_route_handler()
        names: tuple[str, ...] = ()
        if self.body_field is not None:
            model = self.body_field.field_info.annotation
            if isinstance(model, type) and issubclass(model, BaseModel):
                names = tuple(model.model_fields)

        async def read_and_handle(request: Request) -> Response:
            bounded = _BoundedRequest(request, names)
            try:
                return await handle(bounded)
            finally:
                bounded.place.close()
                if bounded.is_large:
                    _return_memory_soon()

        return read_and_handle


def _typed(request: Request) -> Scope:
    """Return the request's scope, with the type of JSON in place of no type, or of `curl -d`'s.

    A page of another site can send these types as well, but a browser names the page's origin.
    """
    headers = request.headers
    if headers.get("content-type", _CURL_TYPE) != _CURL_TYPE or "origin" in headers:
        return request.scope
    others = [(name, value) for name, value in headers.raw if name != b"content-type"]
    return {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}


class _BoundedRequest(Request):
    """Request that decodes its body by `read_json`, after a wait in the queue unless small."""

    def __init__(self, request: Request, names: Sequence[str]) -> None:
        super().__init__(_typed(request) if names else request.scope, request.receive, request._send)
        self._names = names
        self.is_large = False
        self.place = ExitStack()
        """Place in the queue of bodies."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _SMALL_BYTES:
            return await read_json(body, self._names)
        self.is_large = len(body) > _LARGE_BYTES
        queues: BodyQueues = self.app.state.body_queues
        on_prompt = this_call().on_prompt
        on_prompt.callback(self.place.close)
        async with self._own_turn():
            next_one = queues.enter(body, self.place)
        await next_one
        async with self._own_turn():
            decoded = await read_json(body, self._names)
            if isinstance(decoded, dict):
                on_prompt.callback(decoded.clear)
            return decoded

    @asynccontextmanager
    async def _own_turn(self) -> AsyncIterator[None]:
        """Wait for a turn of the event loop in which no other body is decoded or validated."""
        turn: asyncio.Lock = self.app.state.body_turn
        await turn.acquire()
        try:
            yield
        finally:
            # The framework answers, or validates the values, in this turn of the loop, after this
            # block.
            asyncio.get_running_loop().call_soon(turn.release)


def _return_memory_soon() -> None:
    """Return large bodies' memory to the system; glibc would hold five times what is needed."""
    loop = asyncio.get_running_loop()
    loop.call_later(_GONE_S, lambda: loop.run_in_executor(None, _return_freed_memory))


def _return_freed_memory() -> None:
    """Return freed memory to the system; does nothing without glibc."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


async def read_json(body: bytes, names: Sequence[str]) -> Any:
    """Decode a body. Raises RequestError if it is not JSON or has too many values.

    names: the body's fields; the error names the faulty one. The event loop runs other tasks
    between the steps of a large body.
    """
    body = body.removeprefix(codecs.BOM_UTF8)
    if _may_hold_too_much(body) and (excess := await _excess(body)):
        await asyncio.sleep(0)
        values = _values(body, names)
        param = max(values, key=lambda name: len(values[name]), default=None)
        raise RequestError(f"{param or 'the body'} holds {excess}", param)
    await asyncio.sleep(0)
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        values = _values(body, names)
        param = next((name for name, value in values.items() if _is_unreadable(value)), None)
        reason = str(error)
        if _HALF.search(body.replace(rb"\\", b"")):
            reason = "an escape \\ud800 to \\udfff is half of a character without its other half"
        raise RequestError(f"{param or 'the body'} is not valid JSON: {reason}", param) from error
    await asyncio.sleep(0)
    return decoded


def _may_hold_too_much(body: bytes) -> bool:
    """Whether a body could have too many values if none of its punctuation were inside strings."""
    return (
        body.count(b'"') > 2 * MOST_TEXTS
        or body.count(b",") > MOST_VALUES
        or body.count(b"{") + body.count(b"[") > DEEPEST
    )


async def _excess(body: bytes) -> str:
    """Return the bound that a body exceeds; "" if it exceeds none."""
    await asyncio.sleep(0)
    plain = unescaped(body)
    if plain.count(b'"') > 2 * MOST_TEXTS:
        return f"more than {MOST_TEXTS} strings"
    await asyncio.sleep(0)
    outside = outside_strings(plain)
    if outside.count(b"{") + outside.count(b"[") > MOST_OBJECTS:
        return f"more than {MOST_OBJECTS} objects and lists"
    if outside.count(b",") > MOST_VALUES:
        return f"more than {MOST_VALUES} values"
    await asyncio.sleep(0)
    return f"objects and lists that are nested more than {DEEPEST} deep" if is_deep(outside) else ""


def _values(body: bytes, names: Sequence[str]) -> dict[str, memoryview]:
    """Return the JSON of each field that is present; nothing if the body cannot be split."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    try:
        parts = msgspec.json.decode(body, type=msgspec.defstruct("Fields", fields))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {name: value for name in names if (value := memoryview(getattr(parts, name)))}


def _is_unreadable(value: memoryview) -> bool:
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return False
