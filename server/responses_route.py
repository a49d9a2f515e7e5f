"""The route of `/v1/responses`: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from engine.api import RequestError
from server.answering import answer_told
from server.preparing import prepare_chat, wants_metrics
from server.protocol import ChatRequest
from server.responses import Responder, ResponsesRequest, as_chat
from server.state import Server

Wished = TypeVar("Wished")


def build_router(server: Server) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation, in the shape of OpenAI's Responses API; nothing is stored."""
        server.unknown_fields.check(body)
        try:
            generation = await prepare_chat(server, checked(as_chat, body))
        except RequestError as error:
            raise in_own_words(error, _PARAMS) from error
        responder = Responder(body, generation, wants_metrics(server, body))
        return await answer_told(http, server, generation, responder, body.stream)

    return router


def checked(as_chat: Callable[[Wished], ChatRequest], body: Wished) -> ChatRequest:
    """The body as a chat; raises RequestError for what its parts lack."""
    try:
        return as_chat(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{place}: {first['msg']}", str(first["loc"][0])) from error


def in_own_words(error: RequestError, params: Mapping[str, str]) -> RequestError:
    """The refusal of a chat, with the field's name as another endpoint has it."""
    param = params.get(error.param or "", error.param)
    message = str(error)
    if error.param and message.startswith(error.param):
        message = f"{param}{message.removeprefix(error.param)}"
    return RequestError(message, param, error.code)


_PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
}
