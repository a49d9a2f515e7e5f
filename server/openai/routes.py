"""Routes of `/v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.http.bodies import BodyRoute
from server.http.error_responses import error_response
from server.openai.preparing import chat_prompt, check_model, prepare_chat, prepare_completion
from server.openai.responses import Record, ResponsesRequest, ResponseWriter, as_chat
from server.openai.translating import answer_translated, checked, endpoint_names, respond
from server.openai.writers import ChatWriter, CompletionWriter
from server.state import Server
from server.wire.errors import http_error
from server.wire.fields import ChatRequest, CompletionRequest

_PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Names that `/v1/responses` has for chat's fields."""

OpenRecord = Callable[[Request, ResponsesRequest], Awaitable[Record]]


def build_router(server: Server, open_record: OpenRecord | None = None) -> APIRouter:
    """Build the routes.

    open_record: replaces a response's input by the whole conversation, and returns how it is kept;
    None if no responses are kept.
    """
    router = APIRouter(route_class=BodyRoute)

    async def record_of(http: Request, body: ResponsesRequest) -> Record:
        return Record() if open_record is None else await open_record(http, body)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await respond(http, server, body, await prepare_chat(server, body), ChatWriter)

    @router.post("/v1/completions")
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await respond(http, server, body, await prepare_completion(server, body), CompletionWriter)

    @router.post("/v1/fim/completions")
    async def create_fim_completion(http: Request, body: CompletionRequest) -> Response:
        """Fill the gap between prompt and suffix; the answer has a chat's format, as Mistral's."""
        return await respond(http, server, body, await prepare_completion(server, body), ChatWriter)

    @router.post("/v1/responses")
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation in the format of OpenAI's Responses API."""
        server.unknown_fields.check(body)
        body.model = check_model(server, body.model)
        writer = partial(ResponseWriter, await record_of(http, body))
        return await answer_translated(http, server, body, as_chat, writer, _PARAMS)

    @router.post("/v1/responses/input_tokens")
    async def count_input_tokens(http: Request, body: ResponsesRequest) -> dict[str, str | int]:
        """Return the number of tokens of a response's prompt."""
        server.unknown_fields.check(body)
        await record_of(http, body)
        with endpoint_names(_PARAMS):
            prompt, _ = await chat_prompt(server, checked(as_chat, body))
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    @router.get("/v1/responses", include_in_schema=False)
    async def refuse_socket(http: Request) -> Response:
        """Refuse a websocket with the status that makes Codex switch to HTTP at once."""
        if http.headers.get("upgrade", "").lower() != "websocket":
            return error_response(http_error(405, "Method Not Allowed", {"allow": "POST"}))
        return error_response(http_error(426, "there are no sockets here; send POST requests"))

    return router
