"""Builds the ASGI application; importing this module creates nothing."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from server import operation_routes, pages_route
from server.anthropic import routes as messages_route
from server.anthropic.messages import MessagesRequest
from server.http import errors
from server.http.middleware import RequestEnvelope
from server.http.openapi import Application
from server.openai import routes as generate_routes
from server.openai.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.openai.responses import ResponsesRequest
from server.state import Server
from server.version import VERSION

BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest)
"""Bodies of all routes."""


def build_app(server: Server) -> FastAPI:
    """Build the application."""
    settings = server.settings
    middleware = [Middleware(RequestEnvelope, metrics=server.metrics, settings=settings)]
    if origins := settings.allowed_origins:
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    # FastAPI's own pages of the description load scripts from another host.
    app = Application(title="Polydraft", version=VERSION, middleware=middleware, docs_url=None, redoc_url=None)
    app.root_path = settings.root_path  # the argument of this name is deprecated
    app.allows_unknown_fields = not settings.strict_fields
    errors.install(app)
    app.include_router(generate_routes.build_router(server))
    app.include_router(messages_route.build_router(server))
    app.include_router(operation_routes.build_router(server))
    pages_route.install(app, server)
    return app
