"""Valid bodies with each value replaced in turn: an answer or a 4xx, never a 500.

Values deep in a body that only this server reads (blocks, items, tools) have no schema
that would refuse them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.grid import grid
from tests.server.daemon_process import MODEL, Daemon
from tests.server.weather_tools import PARAMETERS

FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT: list[Any] = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "t"},
    {"role": "tool", "tool_call_id": "c", "content": "r"},
]
TURNS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "f"}]},
            {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": "r"},
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {"type": "url"}}]},
            {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
            {"type": "search_result", "title": "t", "source": "u", "content": [{"type": "text", "text": "r"}]},
        ],
    },
]
ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "namespace": "n", "name": "f", "arguments": "{}", "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "maxLength": 2}}}
COMMON: dict[str, Any] = {
    "model": MODEL,
    "seed": 1,
    "stop": ["zzz"],
    "logit_bias": {"5": 1.5},
    "bad_words": ["zz"],
    "speculation": {"rule": "traversal", "tree": [2, 1]},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
}
TOOLS = {"type": "function", "function": FUNCTION}
ANTHROPIC: dict[str, Any] = {
    "model": MODEL,
    "system": [{"type": "text", "text": "s"}],
    "messages": TURNS,
    "tools": [{"name": "f", "input_schema": PARAMETERS, "defer_loading": True}],
    "tool_choice": {"type": "auto"},
    "attachment_placeholders": True,
    "output_config": {"effort": "low"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": COMMON
    | {"messages": CHAT, "tools": [TOOLS], "response_format": SCHEMA, "max_tokens": 2, "tool_choice": "none"},
    "/v1/completions": COMMON | {"prompt": [[5, 6, 7], [5]], "max_tokens": 2, "guided_choice": ["a", "b"]},
    "/v1/responses": COMMON
    | {
        "input": ITEMS,
        "tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **FUNCTION}]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 2,
    },
    "/v1/messages": ANTHROPIC | {"stop_sequences": ["zzz"], "max_tokens": 2},
    "/v1/messages/count_tokens": ANTHROPIC,
    "/api/chat": {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "thinking": "t", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "r"},
        ],
        "tools": [TOOLS],
        "options": {"num_predict": 2, "seed": 1, "stop": ["zzz"], "num_ctx": 5},
        "stream": False,
        "think": False,
        "format": "",
        "keep_alive": 5,
    },
    "/tokenize": {"model": MODEL, "messages": CHAT, "tools": [TOOLS], "chat_template_kwargs": {"a": 1}},
    "/detokenize": {"model": MODEL, "tokens": [5, 6]},
}
OTHERS: list[Any] = [
    None,
    True,
    -1,
    5,
    10**30,
    0.5,
    "",
    "x",
    "\ud800",
    [],
    [["x"]],
    {},
    {"type": ["x"]},
    [{"type": {}}],
]
SOME: list[Any] = [[["x"]]]
ALSO_MESSAGES = "/v1/messages/count_tokens"
"""It has the fields of `/v1/messages`: the gate leaves it out."""
CASES = [(path, others) for path in BODIES for others in ("some", "all")]


@pytest.fixture(scope="module")
def client(tool_daemon: Daemon) -> Iterator[httpx.Client]:
    with tool_daemon.client() as client:
        yield client
        assert client.get("/ready").status_code == 200, tool_daemon.log


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a body, except the length of the answer."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key not in ("max_tokens", "max_output_tokens", "num_predict"):
            yield (*place, key)
            yield from places(inner, (*place, key))


def changed(body: dict[str, Any], place: tuple[Any, ...], other: Any) -> bytes:
    """The body as JSON, with another value at one place."""
    body = copy.deepcopy(body)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other
    return json.dumps(body).encode()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("path", "others"), grid(CASES, [case for case in CASES if case[1] == "some" and case[0] != ALSO_MESSAGES])
)
def test_no_value_at_any_place_breaks_the_daemon(client: httpx.Client, path: str, others: str) -> None:
    whole = client.post(path, json=BODIES[path])
    assert whole.status_code == 200, whole.text
    headers = {"content-type": "application/json"}
    for place in places(BODIES[path]):
        for other in SOME if others == "some" else OTHERS:
            answer = client.post(path, content=changed(BODIES[path], place, other), headers=headers)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (place, other, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"], (place, other)
