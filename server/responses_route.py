"""The route of `/v1/responses`: whole, or as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from engine.api import PolydraftError, RequestError
from server.answering import (
    KEEP_ALIVE,
    SSE_HEADERS,
    admitted,
    metrics_of,
    run_through,
    speculation_headers,
    with_silences,
)
from server.generation import Delta
from server.preparing import prepare_chat, wants_metrics
from server.protocol import ChatRequest
from server.responses import Responder, ResponsesRequest, as_chat
from server.state import Server

log = logging.getLogger("polydraft")


def build_router(server: Server) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation, in the shape of OpenAI's Responses API; nothing is stored."""
        server.unknown_fields.check(body)
        try:
            generation = await prepare_chat(server, checked_chat(body))
        except RequestError as error:
            raise in_own_words(error) from error
        responder = Responder(body, generation, wants_metrics(server, body))
        if body.stream:
            deltas = await admitted(http, server, generation)
            if deltas is None:
                return Response(status_code=499)
            frames = _frames(deltas, server.settings.sse_keep_alive_interval, responder)
            return StreamingResponse(frames, media_type="text/event-stream", headers=SSE_HEADERS)
        if not await run_through(http, server, generation, responder.take):
            return Response(status_code=499)
        responder.end()
        content = msgspec.json.encode(responder.response(responder.status))
        headers = speculation_headers(metrics_of(generation))
        return Response(content, media_type="application/json", headers=headers)

    return router


def checked_chat(body: ResponsesRequest) -> ChatRequest:
    """The body as a chat; raises RequestError for what its parts lack."""
    try:
        return as_chat(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{place}: {first['msg']}", str(first["loc"][0])) from error


def in_own_words(error: RequestError) -> RequestError:
    """The refusal of a chat, with the field's name as this endpoint has it."""
    param = _PARAMS.get(error.param or "", error.param)
    message = str(error)
    if error.param and message.startswith(error.param):
        message = f"{param}{message.removeprefix(error.param)}"
    return RequestError(message, param, error.code)


_PARAMS = {"messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens"}


async def _frames(
    deltas: AsyncGenerator[Delta, None], keep_alive_s: float, responder: Responder
) -> AsyncIterator[bytes]:
    def frames(events: list[dict[str, Any]]) -> bytes:
        return b"".join(
            b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n" for event in events
        )

    try:
        yield frames(responder.begin())
        async with aclosing(with_silences(deltas, keep_alive_s)) as paced:
            async for delta in paced:
                if delta is None:
                    yield KEEP_ALIVE
                elif events := responder.take(delta):
                    yield frames(events)
        yield frames(responder.end())
    except PolydraftError as error:
        yield frames(responder.fail(error))
    except Exception as error:
        log.exception("a stream broke")
        yield frames(responder.fail(error))
    finally:
        await deltas.aclose()
