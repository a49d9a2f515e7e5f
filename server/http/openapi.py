"""FastAPI application whose /openapi.json describes its errors and its treatment of unknown fields."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI


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
_FRAMEWORKS_OWN = ("HTTPValidationError", "ValidationError")
"""Models of FastAPI's own validation errors; `errors.py` answers in OpenAI's format instead."""


class Application(FastAPI):
    """Application that describes the errors it sends, and whether bodies may have unknown fields."""

    allows_unknown_fields = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.state.body_turn = asyncio.Lock()

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
            for path, operations in described["paths"].items():
                shape = _MESSAGES_NAME if path.startswith("/v1/messages") else _NAME
                for method, operation in operations.items():
                    _describe_errors(operation["responses"], method, shape)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _describe_errors(responses: dict[str, Any], method: str, shape: str) -> None:
    """Replace FastAPI's 422 with the status that is sent: 400 for a wrong body, 404 for a name in a path."""
    if responses.pop("422", None) is not None:
        status, why = ("400", "The request is wrong.") if method == "post" else ("404", "There is none of this name.")
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
        responses[status] = {"description": why, "content": content}
