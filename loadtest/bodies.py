"""Bodies that cost a daemon most.

The largest ones by endpoint and field, small ones of many objects, and malformed ones.

The fields come from the daemon's /openapi.json, so that new fields are sent without a change here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
_MESSAGE = {"role": "user", "content": "hello"}
_LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [_MESSAGE], "max_tokens": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": [_MESSAGE], "max_tokens": 1},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
}
"""Smallest valid body of each endpoint, without its model."""
ALLOWED = "the most that is allowed"
"""Name of the values that have the largest valid size."""
_MARGIN = 1024
"""Number of bytes reserved for the rest of the body."""


def _array(item: str) -> Callable[[int], str]:
    return lambda room: "[" + ",".join([item] * (room // (len(item) + 1))) + "]"


def _mixed_array(first: str, item: str) -> Callable[[int], str]:
    return lambda room: "[" + ",".join([first, *[item] * (room // (len(item) + 1) - len(first))]) + "]"


def _text(piece: str) -> Callable[[int], str]:
    return lambda room: '"' + piece * (room // len(piece)) + '"'


def _object(room: int) -> str:
    return "{" + ",".join(f'"{number}":1' for number in range(room // 12)) + "}"


KINDS: dict[str, Callable[[int], str]] = {
    "words": _text("word "),
    "one word": _text("a"),
    "escapes": _text("\\u00e9"),
    "halves of characters": _text("\\ud800"),
    "numbers": _array("1"),
    "fractions": _array("1.5"),
    "nulls": _array("null"),
    "objects": _array("{}"),
    "lists": _array("[]"),
    "texts": _array('"a"'),
    "lists of numbers": _array("[1]"),
    "a text, then numbers": _mixed_array('"a"', "1"),
    "a number, then objects": _mixed_array("1", "{}"),
    "messages": _array('{"role":"user","content":"a"}'),
    "messages of wrong types": _array('{"role":1,"content":[{}]}'),
    "content parts": _array('{"type":"text","text":"a"}'),
    "keys": _object,
    "deep lists": lambda room: "[" * (room // 2) + "]" * (room // 2),
    "deep objects": lambda room: '{"a":' * (room // 6) + "1" + "}" * (room // 6),
    "digits": lambda room: "1" * room,
}
"""Functions that return JSON of about a number of bytes, by its content; every field gets each of
them.
"""


@dataclass(frozen=True)
class MeasuredBody:
    """Request of the measurement."""

    path: str
    field: str
    kind: str
    build: Callable[[], bytes]
    """Function that builds its JSON; all bodies of a measurement would not fit in memory."""


def filled(path: str, model: str, field: str, value: str, more: dict[str, Any] | None = None) -> bytes:
    """Return the JSON of a valid body with this JSON in one field."""
    rest = {"model": model, **_LEAST[path], **(more or {})}
    rest.pop(field, None)
    return f'{json.dumps(rest)[:-1]}, "{field}": {value}}}'.encode()


def _full(path: str, model: str, field: str, value: Callable[[int], str], max_bytes: int) -> bytes:
    return filled(path, model, field, value(max_bytes - _MARGIN))


def fields_of(described: dict[str, Any], path: str) -> list[str]:
    """Return the names of the fields of an endpoint's body from /openapi.json."""
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return sorted(schema["properties"])


def sweep(described: dict[str, Any], model: str, max_bytes: int) -> Iterator[MeasuredBody]:
    """Yield every field of every endpoint with every value at its full size."""
    for path in ENDPOINTS:
        if path not in described["paths"]:
            continue
        for field in fields_of(described, path):
            for kind, value in KINDS.items():
                yield MeasuredBody(path, field, kind, partial(_full, path, model, field, value, max_bytes))


def limits(model: str, max_bytes: int) -> Iterator[MeasuredBody]:
    """Yield bodies with valid values of the largest size.

    They are served, or refused for their sum.
    """
    completions, chat = "/v1/completions", "/v1/chat/completions"
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "enum": ["a" * 20]} for n in range(2000)}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": "word " * 5000, "parameters": schema}}
        for n in range(16)
    ]
    asked: list[tuple[str, str, Any, dict[str, Any]]] = [
        (completions, "logit_bias", {str(n): 1 for n in range(1024)}, {"n": 16, "max_tokens": 8}),
        (completions, "allowed_token_ids", [n % 4096 for n in range(65536)], {"n": 16, "max_tokens": 8}),
        (completions, "bad_words", ["word " * 51] * 128, {"n": 16, "max_tokens": 8}),
        (completions, "stop_token_ids", list(range(4096)), {"n": 16, "max_tokens": 8}),
        (completions, "stop", ["a" * (max_bytes // 20)] * 16, {"n": 16, "max_tokens": 8}),
        (completions, "prompt", ["hello"] * 128, {"n": 4, "max_tokens": 1}),
        (completions, "prompt_logprobs", 20, {"n": 4, "prompt": [5] * 2000}),
        (completions, "logprobs", 20, {"n": 4, "prompt": [5] * 1900, "echo": True}),
        (completions, "n", 128, {"max_tokens": 2}),
        (chat, "tools", tools, {}),
        (chat, "response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, {}),
        (chat, "prediction", {"type": "content", "content": "word " * 400}, {"n": 16}),
        (chat, "messages", [_MESSAGE] * 1500, {}),
        (chat, "documents", [{"text": "word " * 6000}] * 128, {}),
    ]
    for path, field, value, more in asked:
        yield MeasuredBody(path, field, ALLOWED, partial(filled, path, model, field, json.dumps(value), more))


MALFORMED = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": 5}',
    b'{"model": "nobody", "messages": []}',
    b'{"messages": [{"role": "nobody", "content": 1}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
    b'{"a":' * 500,
    b"\xff" * 1000,
    b'{"no_such_field": "' + b"x" * 20_000 + b'"}',
)
"""Bodies of a chat that are refused."""


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _function(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object"}}}


def crowds(model: str) -> Iterator[MeasuredBody]:
    """Yield small bodies of a chat whose number of objects makes them costly."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": _deep(40)}}
    fields: dict[str, tuple[str, Any]] = {
        "1,301 messages": ("messages", [{"role": "user", "content": "a"}] * 1301),
        "600 messages, answered": ("messages", [{"role": "user", "content": "a"}] * 600),
        "512 tools": ("tools", [_function(number) for number in range(512)]),
        "a deep schema": ("response_format", schema),
        "4,000 stop tokens": ("stop_token_ids", list(range(4000))),
    }
    path = ENDPOINTS[0]
    for kind, (field, value) in fields.items():
        yield MeasuredBody(path, field, kind, partial(filled, path, model, field, json.dumps(value)))
