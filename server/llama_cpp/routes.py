"""Routes of `/infill`, `/completion` and `/props`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

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
from server.version import VERSION


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

    @router.get("/props")
    async def props() -> dict[str, Any]:
        """Return the properties of server and model, in the format of llama.cpp's server."""
        settings = {"n_ctx": server.client.ready_facts().max_model_len, "params": asdict(server.defaults)}
        return {
            "default_generation_settings": settings,
            "total_slots": server.settings.max_num_seqs,
            "model_alias": server.model_name,
            "model_path": server.settings.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": server.tokenizer.chat_template,
            "build_info": f"polydraft-{VERSION}",
            "is_sleeping": not server.client.is_awake,
        }

    return router
