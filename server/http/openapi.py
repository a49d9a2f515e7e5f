"""FastAPI application whose /openapi.json has its errors and treatment of unknown fields."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI

from server.http.body_queue import BodyQueues
from server.http.error_responses import ANSWERING, OLLAMA_PATH, PROTECTED


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties, all of them required."""
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT: dict[str, Any] = {"type": "string"}
_TEXT_OR_NULL = {"anyOf": [_TEXT, {"type": "null"}]}
_NAME = "Error"
_ERROR_SCHEMA = {
    "title": _NAME,
    "description": "What every error answer holds, in OpenAI's shape.",
    **_object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
}
_MESSAGES_NAME = "MessagesError"
_MESSAGES_SCHEMA = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))
_OLLAMA_NAME = "OllamaError"
_OLLAMA_SCHEMA = _object(error=_TEXT)
_FRAMEWORKS_OWN = ("HTTPValidationError", "ValidationError")
"""FastAPI's models of validation errors; `error_responses.py` answers in OpenAI's format."""


class Application(FastAPI):
    """Application that describes its errors, and whether bodies may have unknown fields."""

    allows_unknown_fields = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.state.body_turn = asyncio.Lock()
        self.state.body_queues = BodyQueues()

    def openapi(self) -> dict[str, Any]:
        """Return the description, built once."""
        if self.openapi_schema is None:
            described = super().openapi()
            schemas = described.setdefault("components", {}).setdefault("schemas", {})
            for name in _FRAMEWORKS_OWN:
                schemas.pop(name, None)
            for schema in schemas.values():
                # Bodies keep unknown names, so that they can be refused by name.
                if schema.get("additionalProperties") is True and not self.allows_unknown_fields:
                    schema["additionalProperties"] = False
            schemas[_NAME] = _ERROR_SCHEMA
            schemas[_MESSAGES_NAME] = _MESSAGES_SCHEMA
            schemas[_OLLAMA_NAME] = _OLLAMA_SCHEMA
            for path, operations in described["paths"].items():
                for method, operation in operations.items():
                    _describe_errors(operation["responses"], path, method)
        assert self.openapi_schema is not None
        return self.openapi_schema


_WHY = {
    "400": "The request is wrong.",
    "401": "The server has keys, and the request has none of them.",
    "404": "There is none of this name.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too many requests are open or wait, or the client asks too often.",
    "500": "The server has failed.",
    "503": "The model loads, the daemon drains, or the engine has stopped.",
}
_NEEDS_ENGINE = (*ANSWERING, "/health", "/ping", "/ready")
"""Paths that are 503 without a running engine."""


def _statuses(path: str, method: str) -> list[str]:
    """Return the statuses of errors that a route sends."""
    statuses = []
    if path.startswith(PROTECTED):
        statuses += ["401"]
    if method == "post":
        statuses += ["400", "404", "413", "415", "429", "500", "503"]
    elif path.startswith(_NEEDS_ENGINE):
        statuses += ["503"]
    if "{" in path:
        statuses += ["404"]
    return sorted(statuses)


def _describe_errors(responses: dict[str, Any], path: str, method: str) -> None:
    """Describe the errors of a route in place of FastAPI's 422, which is never sent."""
    responses.pop("422", None)
    shape = _NAME
    if path.startswith("/v1/messages"):
        shape = _MESSAGES_NAME
    elif OLLAMA_PATH.search(path):
        shape = _OLLAMA_NAME
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    for status in _statuses(path, method):
        responses[status] = {"description": _WHY[status], "content": content}
