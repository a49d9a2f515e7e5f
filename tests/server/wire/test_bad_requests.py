"""Wrong requests: a 4xx that names the field, and the daemon serves on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.openai.responses import ResponsesRequest
from server.wire.fields import ChatRequest, CompletionRequest, GenerationFields
from tests.server.daemon_process import MODEL, Daemon
from tests.server.good_bodies import CHAT, COMPLETIONS, GOOD, USER, error_of, send
from tests.server.tiny_models import MAX_POSITIONS, VOCAB_SIZE

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOO_LONG = [5] * MAX_POSITIONS


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "lucky"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a", 1]}, "stop.1"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids.0"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        ({"user": 5}, "user"),
        ({"metrics": "all"}, "metrics"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"speculation": {"num_drafts": 10**30}}, "speculation.num_drafts"),
        ({"speculation": {"tree": [10**9] * 200}}, "speculation.num_drafts"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"allowed_token_ids": [5, -1]}, "allowed_token_ids"),
        ({"bad_words": "no"}, "bad_words"),
        # Known fields that are not served: refused, never dropped in silence.
        ({"prediction": {"type": "static", "content": "x"}}, "prediction.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"poem": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_grammar": "not lark"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**31}, "priority"),
    ],
)
def test_a_bad_value_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """Wrong types, out of range, not served: 400 before a stream begins."""
    for path in GOOD:
        for stream in (False, True):
            error = error_of(send(http, path, {"stream": stream, **fields}), 400)
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [USER, {"role": "user"}]}, "messages.1.content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * MAX_POSITIONS}]}, "messages"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"store": "yes"}, "store"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_a_bad_chat_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """Fields of chats alone: roles, parts, tools."""
    assert error_of(send(http, CHAT, fields), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[5], []]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt.1"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**62]}, "stop_token_ids"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**80]}, "prompt"),
        ({"prompt": [[5], [VOCAB_SIZE]]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": TOO_LONG}, "prompt"),
        ({"prompt": "word " * MAX_POSITIONS}, "prompt"),
        ({"max_tokens": -(10**30)}, "max_tokens"),
        ({"prompt": ["x"] * 128, "n": 128}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": "all"}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "the end"}, "suffix"),
    ],
)
def test_a_bad_completion_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """Fields of completions alone: prompts of all types, echo, suffix."""
    assert error_of(send(http, COMPLETIONS, fields), 400)["param"] == param


def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client) -> None:
    """Neutral values of fields that are not served change nothing."""
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "user": "someone"}
    chat = {"tools": [], "tool_choice": "auto", "logprobs": False, "response_format": {"type": "text"}, "store": False}
    for path, fields in ((CHAT, neutral | chat), (COMPLETIONS, neutral | {"echo": False, "suffix": ""})):
        assert send(http, path, fields).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, ChatRequest), (COMPLETIONS, CompletionRequest), ("/v1/responses", ResponsesRequest)]
)
def test_null_means_a_field_is_absent(http: httpx.Client, path: str, body: type[GenerationFields]) -> None:
    what = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "x"}}.get(path, {"input": "x"})
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields = dict.fromkeys(body.model_fields) | {"model": MODEL, length: 1} | what
    assert http.post(path, json=fields).status_code == 200


def test_extreme_but_legal_values_are_served(http: httpx.Client) -> None:
    """Temperatures next to zero, empty filters and the ends of the seed range give an answer."""
    for fields in (
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_p": 0},
        {"temperature": 2, "top_p": 1e-300, "min_p": 1},
        {"top_k": 2**31 - 1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop_token_ids": [0, VOCAB_SIZE - 1]},
        {"max_tokens": 10**30, "stop": list("aeiou n")},
    ):
        response = send(http, COMPLETIONS, fields)
        assert response.status_code == 200, (fields, response.text)
        assert response.json()["usage"]["completion_tokens"] >= 1


def test_a_long_prompt_names_its_reason(http: httpx.Client) -> None:
    """A prompt that leaves no room has the code that clients look for."""
    for path, fields in (
        (COMPLETIONS, {"prompt": TOO_LONG}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * MAX_POSITIONS}]}),
    ):
        error = error_of(send(http, path, fields), 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": float("-inf")},
        {"guided_regex": "a\ud800"},
        {"guided_choice": ["\udc00"]},
        {"logit_bias": {"\ud800": "x"}},
        {"prompt": "half \ud83d"},
        {"messages": [{"role": "user", "content": "half \ud83d"}]},
    ],
)
def test_values_that_json_does_not_have_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    """Non-finite numbers and halves of surrogate pairs: 400, as for any JSON that is malformed."""
    for path in GOOD:
        assert "not valid JSON" in error_of(send(http, path, fields), 400)["message"]


@pytest.mark.parametrize("end", [0, 1])
def test_the_ends_of_openai_s_bounds_are_taken(http: httpx.Client, end: int) -> None:
    """An answer of 0 tokens is empty and ended by its length."""
    bounds = {
        "temperature": (0, 2),
        "top_p": (0, 1),
        "frequency_penalty": (-2, 2),
        "presence_penalty": (-2, 2),
        "logit_bias": ({"5": -100}, {"5": 100}),
        "seed": (-(2**63), 2**63 - 1),
        "max_tokens": (0, 1),
        "n": (1, 128),
    }
    fields: dict[str, Any] = {name: ends[end] for name, ends in bounds.items()}
    for path in GOOD:
        logprobs = {"logprobs": True, "top_logprobs": 20 * end} if path == CHAT else {"logprobs": 5 * end}
        answer = send(http, path, {**fields, **logprobs})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == fields["n"]
        assert {one["finish_reason"] for one in answer.json()["choices"]} == {"length"}
        assert answer.json()["usage"]["completion_tokens"] == end * fields["n"]
    if not end:
        answer = send(http, CHAT, {"max_completion_tokens": 0})
        message = answer.json()["choices"][0]["message"]
        assert (answer.status_code, message["content"]) == (200, "")


def test_a_schema_in_a_string_is_json(http: httpx.Client) -> None:
    """vLLM's guided_json may be a text; NaN in it is no JSON."""
    fields = {"guided_json": '{"enum": [NaN]}'}
    for path in GOOD:
        error = error_of(send(http, path, fields), 400)
        assert error["param"] == "guided_json"
        assert "not valid JSON" in error["message"]


@pytest.mark.parametrize(("number", "param"), [("1e400", "top_p"), ("9" * 5000, "seed")])
def test_a_number_too_large_for_json_readers_is_refused_by_name(http: httpx.Client, number: str, param: str) -> None:
    """Floats beyond double precision and integers of thousands of digits."""
    body = json.dumps({**GOOD[COMPLETIONS], param: 0}).replace(f'"{param}": 0', f'"{param}": {number}')
    response = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{]}", b'{"model": }', b"[" * 100_000, b'{"a":' * 50_000],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_that_is_no_object_is_refused(http: httpx.Client, path: str, body: bytes) -> None:
    """Bad JSON, JSON that is no object, and JSON too deep to read."""
    response = http.post(path, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["type"] == "invalid_request_error"


def test_a_large_body_is_refused_unread(daemon: Daemon) -> None:
    """10 MB with a length, and a body without one that grows over the limit, both get 413."""

    def growing() -> Iterator[bytes]:
        yield b'{"model": "'
        for _ in range(100):
            yield b"x" * 100_000

    for content in (b"x" * 10_000_000, growing()):
        with daemon.client() as http:
            response = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            assert error_of(response, 413)["code"] == "request_too_large"
            assert send(http, COMPLETIONS, {}).status_code == 200


def test_errors_are_counted_by_status(http: httpx.Client) -> None:
    """Every error answer to a POST is counted under its status."""

    def count() -> float:
        line = next(line for line in http.get("/metrics").text.splitlines() if line.startswith(name))
        return float(line.rpartition(" ")[2])

    name = 'polydraft_request_errors_total{code="400"'
    send(http, CHAT, {"n": 0})
    before = count()
    send(http, CHAT, {"n": 0})
    assert count() == before + 1


def test_request_ids_are_echoed_or_made(http: httpx.Client) -> None:
    """Cut to a bounded length; without one there is a new one each time."""
    assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert http.get("/nowhere", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    assert len(http.get("/health", headers={"x-request-id": "x" * 5000}).headers["x-request-id"]) <= 128
    assert len({http.get("/health").headers["x-request-id"] for _ in range(3)}) == 3


HALF = "\ud800"
DEEP: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 20_000}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "x", "metadata": {"a": HALF}}),
        ("/v1/responses", {"input": "x", "metadata": {"a": HALF}, "stream": True}),
        ("/v1/responses", {"input": "x", "user": HALF}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "text", "x": HALF}}}),
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[" * 20_000}]},
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "metadata": {HALF: 1}}),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [DEEP]}]}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {HALF: 1}}}],
            },
        ),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "", "tool_calls": [DEEP]}]}),
    ],
)
def test_half_characters_and_deep_nesting_are_refused_everywhere(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    """Also where any object may stand: 400, not an internal error."""
    content = json.dumps({"model": MODEL, **fields})
    error_of(http.post(path, content=content, headers={"content-type": "application/json"}), 400)
