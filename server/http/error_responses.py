"""Responses of errors, in OpenAI's format (in Anthropic's and Ollama's on their paths).

Every status has this format, also errors that the framework raises (404, 405, validation). Not for:
the table of errors (`wire/errors.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.api import DeadlineExceeded, EngineBusy, EngineStopped, RequestError
from server.wire.current_call import this_call
from server.wire.errors import (
    ApiError,
    ErrorBody,
    ErrorEnvelope,
    anthropic_error,
    http_error,
    ollama_error,
    refusal_facts,
    to_api_error,
)
from server.wire.unsupported_fields import UNKNOWN

log = logging.getLogger("polydraft")

API_PATHS = (
    "/v1/chat/completions",
    "/v1/fim/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/infill",
    "/completion",
)
"""Paths that clients with a wrong base URL miss."""


ANSWERING = ("/v1/", "/infill", "/completion", "/props", "/api/")
"""Beginnings of paths that answer, or describe the model."""
PROTECTED = (*ANSWERING, "/tokenize", "/detokenize", "/dashboard/state")
"""Beginnings of paths that need a key, if the server has keys (also `/tokenizer_info`)."""
OLLAMA_PATH = re.compile(r"/api/(chat|generate|show|tags|ps|version|embed|embeddings|pull|push|create|copy|delete)$")


def error_response(error: Exception, path: str = "") -> Response:
    """Return the response of an error in the format of the path's API."""
    api_error = to_api_error(error)
    this_call().refusal = refusal_facts(api_error)
    body: Any = ErrorEnvelope(api_error.body)
    if "/v1/messages" in path:
        body = anthropic_error(api_error)
    elif OLLAMA_PATH.search(path):
        body = ollama_error(api_error)
    return Response(
        msgspec.json.encode(body),
        status_code=api_error.status,
        headers=api_error.headers,
        media_type="application/json",
    )


def _no_route(path: str) -> str:
    """Return the message for an unknown path, with the served path that ends alike."""
    # Below another resource of `/v1/`, the base URL is right, and the resource is not served.
    asked = path.rstrip("/")
    hint = ""
    if not re.match("/v1/(?!v1/|chat/)[^/]+/", asked):
        near = next((known for known in API_PATHS if asked.endswith(known.removeprefix("/v1"))), None)
        if near:
            hint = f" (did you mean {near}? check the base URL)"
    return f"{path} does not exist here{hint}; /docs lists the paths"


def _validation_message(error: RequestValidationError) -> ErrorBody:
    problems = error.errors()
    # Each branch of a union reports an error. The error with the longest path is the most specific.
    field = problems[0]["loc"][:2]
    same_field = [problem for problem in problems if problem["loc"][:2] == field]
    first: dict[str, Any] = max(same_field, key=lambda problem: len(problem["loc"]))
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return ErrorBody(f"the body is not valid JSON: {detail}", "invalid_request_error")
    if isinstance(error.body, bytes):
        return ErrorBody("the body is not JSON; send it with Content-Type: application/json", "invalid_request_error")
    param = _param(first, error.body)
    if first["type"] == "extra_forbidden" and param:
        return ErrorBody(f"Unrecognized request argument supplied: {param}", "invalid_request_error", param, UNKNOWN)
    where = f"{param}: " if param else "the body: "
    return ErrorBody(where + str(first["msg"]), "invalid_request_error", param)


def _param(problem: dict[str, Any], body: Any) -> str | None:
    """Return the faulty field as the client wrote it, without pydantic's union branches."""
    path: list[str] = []
    for part in problem["loc"][1:]:
        if isinstance(body, Mapping) and (part in body or problem["type"] == "missing"):
            path.append(str(part))
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int):
            path.append(str(part))
            body = body[part] if part < len(body) else None
    return ".".join(path) or None


def _let_go_of_frames(error: BaseException | None) -> None:
    """Break the cycle of error and frames, which would hold the request in memory."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def install(app: FastAPI) -> None:
    """Answer every error of `app` in its API's format."""

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        _let_go_of_frames(error)
        return error_response(ApiError(400, _validation_message(error)), request.url.path)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        _let_go_of_frames(error)
        if isinstance(error.__cause__, RequestError | EngineBusy | MemoryError | OSError):
            # FastAPI replaces errors that are raised while it reads a body.
            return await on_error(request, error.__cause__)
        detail = str(error.detail)
        if error.status_code == 404:
            detail = _no_route(request.url.path)
        answer = http_error(error.status_code, detail, dict(error.headers or {}))
        return error_response(answer, request.url.path)

    async def on_error(request: Request, error: Exception) -> Response:
        _let_go_of_frames(error)
        if isinstance(error, MemoryError | OSError):
            log.error("a request was refused, because memory or disk is full (%r)", error)
        # `RequestEnvelope` counts it.
        request.state.rejection = to_api_error(error).rejection
        return error_response(error, request.url.path)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    # `RequestEnvelope` answers, counts and logs any other exception.
    for kind in (ApiError, RequestError, EngineBusy, EngineStopped, DeadlineExceeded, MemoryError):
        app.add_exception_handler(kind, on_error)
