"""Maps errors to HTTP responses, in OpenAI's format (in Anthropic's under /v1/messages).

The format is `{"error": {"message": str, "type": str, "param": str | null, "code": str | null}}` for every status,
also for errors that the framework raises (404, 405, validation).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.api import GRAMMAR_UNAVAILABLE, SERVER_FAULTS, DeadlineExceeded, EngineBusy, EngineStopped, RequestError
from server.http.current_call import this_call
from server.openai.unsupported_fields import UNKNOWN, shown

_LONGEST_MESSAGE, _LONGEST_PARAM = 4096, 256


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
        """rejection: reason for the metrics why the request was not admitted; None for other errors."""
        super().__init__(body.message)
        self.status = status
        # Both may quote the client, at a length of megabytes.
        param = body.param and body.param[:_LONGEST_PARAM]
        self.body = msgspec.structs.replace(body, message=body.message[:_LONGEST_MESSAGE], param=param)
        self.headers = headers or {}
        self.rejection = rejection


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


def responses_error(error: ApiError) -> dict[str, Any]:
    """Return the error of a response that failed after it had begun; its code is one of OpenAI's short list."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    body = error.body
    return {"code": code, "message": body.message, "param": body.param, "type": body.type}


def refusal_facts(error: ApiError) -> dict[str, str | None]:
    """Return the facts of an error that logs may hold: the field and the code, never the text."""
    param = error.body.param
    return {"param": shown(param) if param else None, "code": error.body.code or error.body.type}


def error_response(error: Exception, path: str = "") -> Response:
    """Return the response of an error in the format of the path's API."""
    api_error = to_api_error(error)
    this_call().refusal = refusal_facts(api_error)
    is_message = "/v1/messages" in path
    return Response(
        msgspec.json.encode(anthropic_error(api_error) if is_message else ErrorEnvelope(api_error.body)),
        status_code=api_error.status,
        headers=api_error.headers,
        media_type="application/json",
    )


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


API_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/tokenize",
    "/detokenize",
)
"""Paths that clients with a wrong base URL miss."""


PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/dashboard/state")
"""Beginnings of the paths that need a key, if the server has keys; `/tokenizer_info` is among them."""


def _no_route(path: str) -> str:
    """Return the message for an unknown path, with the served path that ends alike."""
    # Below another resource of `/v1/`, a path is one that is not served, and the base URL is right.
    asked = path.rstrip("/")
    is_other = re.match("/v1/(?!v1/|chat/)[^/]+/", asked)
    ends_alike = (one for one in API_PATHS if asked.endswith(one.removeprefix("/v1")))
    near = None if is_other else next(ends_alike, None)
    hint = f" (did you mean {near}? check the base URL)" if near else ""
    return f"{path} does not exist here{hint}; /docs lists the paths"


def _validation_message(error: RequestValidationError) -> ErrorBody:
    problems = error.errors()
    # Each branch of a union reports an error. The one with the longest path is the most specific.
    of_field = [problem for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2]]
    first: dict[str, Any] = max(of_field, key=lambda problem: len(problem["loc"]))
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
    """Return the faulty field as the client wrote it; pydantic also names the branches of its unions."""
    path: list[str] = []
    for part in problem["loc"][1:]:
        if isinstance(body, dict) and (part in body or problem["type"] == "missing"):
            path.append(str(part))
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int):
            path.append(str(part))
            body = body[part] if part < len(body) else None
    return ".".join(path) or None


def _let_go_of_frames(error: BaseException | None) -> None:
    """Break the cycle of error and frames that would hold the request in memory until garbage collection."""
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
        if isinstance(error.__cause__, RequestError | EngineBusy):
            # FastAPI replaces errors that are raised while it reads a body.
            return await on_error(request, error.__cause__)
        detail = _no_route(request.url.path) if error.status_code == 404 else str(error.detail)
        answer = http_error(error.status_code, detail, dict(error.headers or {}))
        return error_response(answer, request.url.path)

    async def on_error(request: Request, error: Exception) -> Response:
        _let_go_of_frames(error)
        # `RequestEnvelope` counts it.
        request.state.rejection = to_api_error(error).rejection
        return error_response(error, request.url.path)

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    # `RequestEnvelope` answers, counts and logs any other exception.
    for kind in (ApiError, RequestError, EngineBusy, EngineStopped, DeadlineExceeded):
        app.add_exception_handler(kind, on_error)
