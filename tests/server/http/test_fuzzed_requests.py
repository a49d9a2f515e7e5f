"""Random JSON against both endpoints: whatever comes, never an internal error."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.openai.responses import ResponsesRequest
from server.wire.fields import ChatRequest, CompletionRequest, GenerationFields
from tests.server.daemon_process import MODEL
from tests.server.event_stream import EventStream
from tests.server.good_bodies import error_of

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.integers(-2, 3) | st.floats(-1, 2) | st.sampled_from([1e-300, float("nan"), float("inf"), 2**63, 10**400])
# Halves of surrogate pairs included: JSON can spell them.
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": TEXT | st.lists(ANYTHING, max_size=2)}
)
NEARLY_RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(MODEL),
    "messages": st.lists(MESSAGE, min_size=1, max_size=3),
    "input": TEXT | st.lists(MESSAGE | st.fixed_dictionaries({"type": TEXT}), max_size=3),
    "max_output_tokens": st.integers(0, 4),
    "prompt": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(-1, 5000), max_size=5),
    "max_tokens": st.integers(0, 4),
    "speculation": st.dictionaries(
        st.sampled_from(["enabled", "num_drafts", "draft_length", "rule", "drafters", "draft_method", "nonsense"]),
        st.booleans() | st.integers(-1, 20) | st.sampled_from(["off", "block", "rrs", "bv_race", "iid", "x", None]),
    ),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "stop_token_ids": st.lists(st.integers(-2, 4100), max_size=4),
    "n": st.integers(0, 3),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": TEXT}),
    "cache_salt": TEXT,
    "truncate_prompt_tokens": st.integers(-1, 9),
    "truncation_side": st.sampled_from(["left", "right"]),
    "return_token_ids": st.booleans(),
    "documents": st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=2),
}
ENDPOINTS: dict[str, tuple[type[GenerationFields], str]] = {
    "/v1/chat/completions": (ChatRequest, "messages"),
    "/v1/completions": (CompletionRequest, "prompt"),
    "/v1/responses": (ResponsesRequest, "input"),
}


def length_of(path: str) -> str:
    """The field that limits an answer."""
    return "max_output_tokens" if path == "/v1/responses" else "max_tokens"


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Any]:
    """An endpoint, and a body that is mostly right but for a few fields; now and then anything at
    all.
    """
    path = draw(st.sampled_from(sorted(ENDPOINTS)))
    fields, what = ENDPOINTS[path]
    if draw(st.integers(0, 9)) == 0:
        return path, draw(ANYTHING)
    # The length is always limited, so that no answer takes long.
    body = {name: draw(NEARLY_RIGHT[name]) for name in ("model", what, length_of(path))}
    others = sorted(set(fields.model_fields) - {"max_tokens", "max_completion_tokens", "max_output_tokens"})
    for name in draw(st.lists(st.sampled_from(others), max_size=4, unique=True)):
        values = NEARLY_RIGHT.get(name, NUMBERS)
        body[name] = draw(values if draw(st.booleans()) else ANYTHING)
    return path, body


@pytest.mark.sole("random bodies")
@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(call=calls())
def test_random_json_never_breaks_the_daemon(http: httpx.Client, call: tuple[str, Any]) -> None:
    """Every answer is whole or a 4xx in OpenAI's error shape; no stream carries an error."""
    path, body = call
    headers = {"content-type": "application/json"}
    with http.stream("POST", path, content=json.dumps(body), headers=headers) as response:
        if response.headers["content-type"].startswith("text/event-stream") and path == "/v1/responses":
            assert "response.failed" not in response.read().decode()
            return
        if response.headers["content-type"].startswith("text/event-stream"):
            stream = EventStream(response)
            assert not any("error" in chunk for chunk in stream.read())
            assert stream.is_done
            return
        response.read()
    if response.status_code == 200:
        assert "output" in response.json() or response.json()["choices"]
    else:
        assert 400 <= response.status_code < 500, response.text
        error_of(response, response.status_code)


def test_numbers_too_long_to_read_are_refused(http: httpx.Client) -> None:
    """An integer of ten thousand digits is a bad request."""
    content = f'{{"model": "{MODEL}", "prompt": "x", "seed": {"9" * 10_000}}}'
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize("path", sorted(ENDPOINTS))
def test_every_field_of_the_schema_can_be_null(http: httpx.Client, path: str) -> None:
    """Null means left out, for every field that need not be there."""
    fields, what = ENDPOINTS[path]
    body = dict.fromkeys(fields.model_fields) | {"model": MODEL, length_of(path): 1}
    body[what] = [{"role": "user", "content": "x"}] if what == "messages" else "x"
    assert http.post(path, json=body).status_code == 200
