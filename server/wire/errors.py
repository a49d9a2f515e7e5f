"""The table of errors: status, type and code of each, in both APIs' formats.

OpenAI's format is `{"error": {"message": str, "type": str, "param": str | null, "code": str |
null}}`. Not for: the responses that carry them (`http/error_responses.py`).
"""

from __future__ import annotations

import errno
from typing import Any

import msgspec

from engine.api import GRAMMAR_UNAVAILABLE, SERVER_FAULTS, DeadlineExceeded, EngineBusy, EngineStopped, RequestError
from server.wire.unsupported_fields import shown

_LONGEST_MESSAGE = 4096
_LONGEST_PARAM = 256
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ErrorBody(msgspec.Struct, frozen=True):
    """Fields that OpenAI's clients read."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """Body of every error response, and data of an error in a stream."""

    error: ErrorBody


class ApiError(Exception):
    """Error response that the server itself decides on."""

    def __init__(
        self, status: int, body: ErrorBody, headers: dict[str, str] | None = None, rejection: str | None = None
    ) -> None:
        """rejection: reason for the metrics if the request was not admitted; else None."""
        super().__init__(body.message)
        self.status = status
        # Both may quote the client, at a length of megabytes.
        param = body.param and body.param[:_LONGEST_PARAM]
        self.body = msgspec.structs.replace(body, message=body.message[:_LONGEST_MESSAGE], param=param)
        self.headers = headers or {}
        self.rejection = rejection


class StorageFault(ApiError):
    """Error of a request whose files cannot be stored or read, usually because the disk is full."""

    def __init__(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"the server's disk is full or cannot be used ({reason}); try again once the operator has made room"
        super().__init__(507, ErrorBody(message, "server_error", code="storage_unavailable"), {"retry-after": "30"})


def model_not_found(name: str, served: str) -> ApiError:
    """Return a 404 for a model that is not served."""
    message = f"The model {name!r} does not exist; this server serves {served!r}"
    return ApiError(404, ErrorBody(message, "invalid_request_error", "model", "model_not_found"))


def to_api_error(error: Exception) -> ApiError:
    """Return the HTTP error for any of the project's errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        if error.code == GRAMMAR_UNAVAILABLE:
            body = ErrorBody(str(error), "service_unavailable", code=error.code)
            return ApiError(503, body, {"retry-after": "1"})
        if error.code in SERVER_FAULTS:
            return ApiError(500, ErrorBody(str(error), "server_error", code=error.code))
        return ApiError(400, ErrorBody(str(error), "invalid_request_error", error.param, error.code))
    if isinstance(error, EngineBusy):
        body = ErrorBody(str(error), "rate_limit_error", code="queue_full")
        return ApiError(429, body, {"retry-after": "1"}, "queue_full")
    if isinstance(error, MemoryError):
        body = ErrorBody("the server has no memory left for this request; try again soon", "service_unavailable")
        return ApiError(503, msgspec.structs.replace(body, code="out_of_memory"), {"retry-after": "5"})
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageFault(error)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, ErrorBody(str(error), "server_error", code="deadline_exceeded"))
    if isinstance(error, EngineStopped):
        body = ErrorBody(str(error), "service_unavailable", code="engine_unavailable")
        return ApiError(503, body, {"retry-after": "5"}, error.rejects)
    return ApiError(500, ErrorBody("internal error; the server's log has the details", "server_error"))


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    fields = {"type": _ANTHROPIC_TYPES.get(error.status, "api_error"), "message": error.body.message}
    return {"type": "error", "error": fields}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's format."""
    return {"error": error.body.message}


def responses_error(error: ApiError) -> dict[str, Any]:
    """Return the error of a response that had begun; its code is of OpenAI's short list."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    body = error.body
    return {"code": code, "message": body.message, "param": body.param, "type": body.type}


def refusal_facts(error: ApiError) -> dict[str, str | None]:
    """Return the facts of an error that logs may hold: the field and the code, never the text."""
    param = error.body.param
    return {"param": shown(param) if param else None, "code": error.body.code or error.body.type}


_HTTP_ERRORS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "host_not_allowed"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_encoding"),
    426: ("invalid_request_error", "sockets_not_supported"),
    431: ("invalid_request_error", "headers_too_large"),
    503: ("service_unavailable", "too_many_connections"),
}


def http_error(status: int, message: str, headers: dict[str, str] | None = None) -> ApiError:
    """Return an error of the transport: authentication, routing, size."""
    kind, code = _HTTP_ERRORS.get(status, ("invalid_request_error", None))
    return ApiError(status, ErrorBody(message, kind, code=code), headers)
