"""Route of `/infill`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.http.bodies import BodyRoute
from server.llama_cpp.infill import InfillRequest, InfillWriter, prepare_infill
from server.openai.translating import respond
from server.state import Server


def build_router(server: Server) -> APIRouter:
    """Build the route."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/infill")
    async def infill(http: Request, body: InfillRequest) -> Response:
        """Fill a gap in a text, in the format of llama.cpp's server."""
        generation, is_cut = await prepare_infill(server, body)
        return await respond(http, server, body, generation, partial(InfillWriter, is_cut))

    return router
