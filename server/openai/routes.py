"""Routes of `/v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.http.bodies import BodyRoute
from server.http.error_responses import error_response
from server.openai.preparing import check_model, prepare_chat, prepare_completion
from server.openai.responses import ResponsesRequest, ResponseWriter, as_chat
from server.openai.translating import answer_translated, respond
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


def build_router(server: Server) -> APIRouter:
    """Build the routes."""
    router = APIRouter(route_class=BodyRoute)

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
        """Answer a conversation in the format of OpenAI's Responses API; nothing is stored."""
        server.unknown_fields.check(body)
        body.model = check_model(server, body.model)
        return await answer_translated(http, server, body, as_chat, ResponseWriter, _PARAMS)

    @router.get("/v1/responses", include_in_schema=False)
    async def refuse_socket(http: Request) -> Response:
        """Refuse a websocket with the status that makes Codex switch to HTTP at once."""
        if http.headers.get("upgrade", "").lower() != "websocket":
            return error_response(http_error(405, "Method Not Allowed", {"allow": "POST"}))
        return error_response(http_error(426, "there are no sockets here; send POST requests"))

    return router
