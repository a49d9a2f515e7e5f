"""Routes of `/infill` and `/completion`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.http.bodies import BodyRoute
from server.llama_cpp.infill import (
    InfillRequest,
    InfillWriter,
    LlamaCompletionRequest,
    prepare_infill,
    prepare_llama_completion,
)
from server.openai.translating import respond
from server.state import Server


def build_router(server: Server) -> APIRouter:
    """Build the routes."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/infill")
    async def infill(http: Request, body: InfillRequest) -> Response:
        """Fill a gap in a text, in the format of llama.cpp's server."""
        generation, is_cut = await prepare_infill(server, body)
        return await respond(http, server, body, generation, partial(InfillWriter, is_cut))

    @router.post("/completion")
    async def complete(http: Request, body: LlamaCompletionRequest) -> Response:
        """Continue a text, in the format of llama.cpp's server."""
        generation = await prepare_llama_completion(server, body)
        return await respond(http, server, body, generation, partial(InfillWriter, False))

    return router
