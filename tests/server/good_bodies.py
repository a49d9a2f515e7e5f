"""A good body of every endpoint, and the shape of errors."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.daemon_process import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [USER], "max_tokens": 2},
    COMPLETIONS: {"model": MODEL, "prompt": "hello", "max_tokens": 2},
}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, whose whole shape is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)
    return error


def send(http: httpx.Client, path: str, fields: dict[str, Any]) -> httpx.Response:
    """Send a good call with some fields replaced, also by NaN and half characters."""
    content = json.dumps({**GOOD[path], **fields})
    return http.post(path, content=content, headers={"content-type": "application/json"})


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    **GOOD,
    RESPONSES: {"model": MODEL, "input": "hello", "max_output_tokens": 2},
    MESSAGES: {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    f"{MESSAGES}/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/detokenize": {"model": MODEL, "tokens": [5]},
}


def post(http: httpx.Client, path: str, fields: dict[str, Any]) -> httpx.Response:
    """A good call with some fields more."""
    return http.post(path, json={**BODIES[path], **fields})


def token_of(http: httpx.Client, text: str) -> int:
    """The token with a text."""
    (token,) = http.post("/tokenize", json={"model": MODEL, "prompt": text, "add_special_tokens": False}).json()[
        "tokens"
    ]
    return int(token)


LENGTHS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (COMPLETIONS, "max_tokens"),
    (COMPLETIONS, "max_completion_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]
"""Endpoints and the names of their bound on an answer's tokens."""
