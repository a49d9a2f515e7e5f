"""Routes of `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.http.bodies import BodyRoute
from server.openai.fields import ChatRequest, CompletionRequest
from server.openai.preparing import prepare_chat, prepare_completion
from server.openai.translating import respond
from server.openai.writers import ChatWriter, CompletionWriter
from server.state import Server


def build_router(server: Server) -> APIRouter:
    """Build the two generating routes."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await respond(http, server, body, await prepare_chat(server, body), ChatWriter)

    @router.post("/v1/completions")
    async def create_completion(http: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        return await respond(http, server, body, await prepare_completion(server, body), CompletionWriter)

    return router
