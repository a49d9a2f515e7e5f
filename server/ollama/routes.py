"""Routes of `/api/`, as Ollama has them."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.http.bodies import BodyRoute
from server.ollama.chats import (
    CHAT_NAMES,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaWriter,
    as_chat,
    as_completion,
    loaded,
    now,
)
from server.ollama.models import ShowRequest, listed_model, served_name, shown_model
from server.openai.preparing import prepare_completion
from server.openai.translating import answer_translated, checked, endpoint_names, respond
from server.state import Server
from server.version import VERSION
from server.wire.errors import http_error

OLLAMA_VERSION = "0.12.6"
"""Version of Ollama whose fields are served; clients compare it before they send newer fields."""
_NOT_SERVED = "embed embeddings pull push create copy delete".split()
_GENERATE_NAMES = CHAT_NAMES | {"messages": "prompt"}


def build_router(server: Server) -> APIRouter:
    """Build the routes."""
    router = APIRouter(route_class=BodyRoute)
    started = now()
    for name in _NOT_SERVED:
        router.add_api_route(f"/api/{name}", _refuse, methods=["POST", "DELETE"], include_in_schema=False)
    _add_answers(router, server)

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        """Return the version of Ollama's API that is served, and the daemon's."""
        return {"version": OLLAMA_VERSION, "polydraft": VERSION}

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """Return the served model, under each of its names."""
        return {"models": [listed_model(server, name, started) for name in server.settings.served_names()]}

    @router.get("/api/ps")
    async def running() -> dict[str, Any]:
        """Return the served model if it is in memory."""
        return await tags() if server.client.is_awake else {"models": []}

    @router.post("/api/show")
    async def show(body: ShowRequest) -> dict[str, Any]:
        """Return a description of the served model."""
        server.unknown_fields.check(body)
        served_name(server, body.model or body.name)
        return shown_model(server, started)

    return router


async def _refuse() -> Response:
    raise http_error(404, "the daemon serves the model that it was started with, and no embeddings")


def _add_answers(router: APIRouter, server: Server) -> None:
    def named(body: OllamaChatRequest | OllamaGenerateRequest) -> str:
        """Return the served name; the answer has the name that the client uses."""
        server.unknown_fields.check(body)
        served = served_name(server, body.model)
        body.model = body.model or served
        server.client.ready_facts()
        return served

    @router.post("/api/chat")
    async def chat(http: Request, body: OllamaChatRequest) -> Response:
        """Answer a conversation in the format of Ollama."""
        served = named(body)
        if not body.messages:
            return JSONResponse(loaded(str(body.model), True))
        return await answer_translated(http, server, body, partial(as_chat, served), OllamaWriter, CHAT_NAMES)

    @router.post("/api/generate")
    async def generate(http: Request, body: OllamaGenerateRequest) -> Response:
        """Answer a prompt, or continue a text, in the format of Ollama."""
        served = named(body)
        if not body.prompt and not body.suffix:
            return JSONResponse(loaded(str(body.model), False))
        if not body.raw and not body.suffix:
            return await answer_translated(http, server, body, partial(as_chat, served), OllamaWriter, _GENERATE_NAMES)
        with endpoint_names(_GENERATE_NAMES):
            completion = checked(partial(as_completion, served), body)
            generation = await prepare_completion(server, completion, most_tokens=None)
        return await respond(http, server, body, generation, OllamaWriter)
