"""Builds the ASGI application; importing this module creates nothing."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from server.anthropic import routes as messages_route
from server.anthropic.messages import MessagesRequest
from server.batches import routes as batch_routes
from server.batches.batches import Batches
from server.http import error_responses
from server.http.middleware import RequestEnvelope
from server.http.openapi import Application
from server.llama_cpp import routes as infill_route
from server.ollama import routes as ollama_routes
from server.openai import routes as generate_routes
from server.openai.responses import ResponsesRequest
from server.routes import operations, pages
from server.state import Server
from server.version import VERSION
from server.wire.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest)
"""Bodies of all routes."""


def build_app(server: Server, batches: Batches | None = None) -> FastAPI:
    """Build the application; batches: None if the daemon has no folder for them."""
    settings = server.settings
    middleware = [Middleware(RequestEnvelope, metrics=server.metrics, settings=settings)]
    if origins := settings.allowed_origins:
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    # FastAPI's own pages of the description load scripts from another host.
    app = Application(title="Polydraft", version=VERSION, middleware=middleware, docs_url=None, redoc_url=None)
    app.root_path = settings.root_path  # the argument of this name is deprecated
    app.allows_unknown_fields = not settings.strict_fields
    error_responses.install(app)
    if batches is not None and batches.responses is not None:
        generating = generate_routes.build_router(server, batches.responses.open)
    else:
        generating = generate_routes.build_router(server)
    app.include_router(generating)
    app.include_router(infill_route.build_router(server))
    app.include_router(messages_route.build_router(server))
    app.include_router(ollama_routes.build_router(server))
    app.include_router(operations.build_router(server))
    app.include_router(batch_routes.build_router(batches))
    pages.install(app, server)
    return app
