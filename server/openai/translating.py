"""Common part of the generating routes, and translation of other APIs' requests to a chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from engine.api import RequestError
from server.openai.preparing import prepare_chat
from server.serving.answering import AnswerWriter, answer
from server.serving.generation import Generation
from server.state import Server
from server.wire.current_call import this_call
from server.wire.fields import ChatRequest, GenerationFields, SpeculationFields


class Streamable(Protocol):
    """Fields that the bodies of all generating routes have."""

    stream: bool
    metrics: bool | None


Asked = TypeVar("Asked")
Streamed = TypeVar("Streamed", bound=Streamable)
Translated = TypeVar("Translated", bound=GenerationFields)
Writer = Callable[[Streamed, Generation, bool], AnswerWriter]
"""Makes a writer from the body, the generation, and whether the answer has metrics."""


async def respond(
    http: Request, server: Server, body: Streamed, generation: Generation, writer: Writer[Streamed]
) -> Response:
    """Run a generation and answer in the shape of `writer`."""
    with_metrics = body.metrics
    if with_metrics is None:
        with_metrics = server.settings.per_request_spec_decode_metrics == "detailed"
    return await answer(http, server.sender, generation, writer(body, generation, with_metrics), body.stream)


async def answer_translated(
    http: Request,
    server: Server,
    body: Streamed,
    as_chat: Callable[[Streamed], ChatRequest],
    writer: Writer[Streamed],
    params: Mapping[str, str],
) -> Response:
    """Answer a body that stands for a chat; params: the endpoint's names of chat's fields."""
    with endpoint_names(params):
        generation = await prepare_chat(server, checked(as_chat, body))
        conversation = getattr(body, params.get("messages", "messages"))
        if isinstance(conversation, list):
            conversation.clear()
        return await respond(http, server, body, generation, writer)


def checked(translate: Callable[[Asked], Translated], body: Asked) -> Translated:
    """Return the body as a chat or completion; raises RequestError if that is not valid."""
    try:
        return translate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"{place}: {first['msg']}", str(first["loc"][0])) from error


@contextmanager
def endpoint_names(params: Mapping[str, str]) -> Iterator[None]:
    """Rename chat's fields in errors and in the list of ignored fields."""
    call = this_call()
    num_ignored = len(call.ignored)
    try:
        yield
        call.ignored[num_ignored:] = [params.get(name, name) for name in call.ignored[num_ignored:]]
    except RequestError as error:
        param = params.get(error.param or "", error.param)
        message = _with_names(str(error), error.param, params)
        raise RequestError(message, param, error.code) from error


def _with_names(message: str, param: str | None, params: Mapping[str, str]) -> str:
    """Return an error's message with the endpoint's names of fields."""
    for chat_name, name in params.items():
        if "_" in chat_name:
            message = re.sub(rf"\b{chat_name}\b", name, message)
        elif chat_name == param and message.startswith(chat_name):
            # Elsewhere in the message it may be a word.
            message = name + message.removeprefix(chat_name)
    return message


def refuse_drafts(speculation: SpeculationFields | None) -> None:
    """Raise RequestError if drafts are to be returned: these APIs have no field for them."""
    if speculation is not None and speculation.return_drafts:
        message = "speculation.return_drafts is not supported here; use /v1/chat/completions"
        raise RequestError(message, "speculation.return_drafts", "unsupported_value")
