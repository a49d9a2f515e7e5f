"""Routes of `/v1/responses`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.http.bodies import BodyRoute
from server.http.errors import error_response, http_error
from server.openai.preparing import check_model
from server.openai.responses import ResponsesRequest, ResponseWriter, as_chat
from server.openai.translating import answer_translated
from server.state import Server

_PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def build_router(server: Server) -> APIRouter:
    """Build the routes."""
    router = APIRouter(route_class=BodyRoute)

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
