"""What endpoints share that answer in another shape than OpenAI's chat: a wish as a chat, refusals in their words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from engine.api import RequestError
from server.http.calls import this_call
from server.openai.fields import ChatRequest, SpeculationFields
from server.openai.preparing import prepare_chat
from server.serving.answering import Teller, answer_told
from server.serving.generation import Generation
from server.state import Server

Wished = TypeVar("Wished", bound=BaseModel)


async def answer_translated(
    http: Request,
    server: Server,
    body: Wished,
    as_chat: Callable[[Wished], ChatRequest],
    teller_of: Callable[[Generation], Teller],
    params: Mapping[str, str],
    streams: bool,
) -> Response:
    """Answer a body as the chat it stands for; params: names of chat's fields in the words of the endpoint."""
    server.unknown_fields.check(body)
    with in_own_words(params):
        generation = await prepare_chat(server, checked(as_chat, body))
        return await answer_told(http, server, generation, teller_of(generation), streams)


def checked(as_chat: Callable[[Wished], ChatRequest], body: Wished) -> ChatRequest:
    """The body as a chat; raises RequestError for what its parts lack."""
    try:
        return as_chat(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{place}: {first['msg']}", str(first["loc"][0])) from error


@contextmanager
def in_own_words(params: Mapping[str, str]) -> Iterator[None]:
    """Refusals and reports of a chat name the field as the endpoint has it."""
    call = this_call()
    own = len(call.ignored)
    try:
        yield
        call.ignored[own:] = [params.get(name, name) for name in call.ignored[own:]]
    except RequestError as error:
        param = params.get(error.param or "", error.param)
        message = str(error)
        if error.param and message.startswith(error.param):
            message = f"{param}{message.removeprefix(error.param)}"
        raise RequestError(message, param, error.code) from error


def refuse_drafts(speculation: SpeculationFields | None) -> None:
    """Raise RequestError where drafts are to be returned, for which these shapes have no place."""
    if speculation is not None and speculation.return_drafts:
        message = "speculation.return_drafts is not supported here; use /v1/chat/completions"
        raise RequestError(message, "speculation.return_drafts", "unsupported_value")
