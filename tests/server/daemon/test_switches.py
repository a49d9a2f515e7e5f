"""Flags that change what a daemon accepts and shows, all set on one daemon."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.grid import slow_fixture
from tests.server.daemon_process import MODEL, Daemon, Daemons
from tests.server.good_bodies import BODIES, CHAT, LENGTHS, MESSAGES, error_of, post
from tests.server.tiny_models import MAX_POSITIONS

SECOND = "second"


@pytest.fixture(scope="module")
@slow_fixture
def daemon(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    names = ["--served-model-name", SECOND]
    return daemons.get(*pair_arguments, *names, "--no-calibrate", "--no-dashboard", "--strict-fields")


@pytest.fixture
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client


def test_an_operator_may_refuse_unknown_names(daemon: Daemon, http: httpx.Client) -> None:
    """Unknown fields are refused as by OpenAI; known ones and ones without effect are not."""
    for path in sorted(BODIES):
        answer = post(http, path, {"modle": "something secret", "x\nERROR y": 1, "z" * 5000: 2})
        error = answer.json()["error"] if MESSAGES in path else error_of(answer, 400)
        names = f"modle, x\\nERROR y, {'z' * 64}"
        assert error["message"].startswith(f"Unrecognized request arguments supplied: {names} (did you mean mod")
        if MESSAGES not in path:
            assert (error["param"], error["code"]) == ("modle", "unknown_parameter")
        assert post(http, path, {"a_key_of_next_month": None}).status_code == 200
    assert post(http, CHAT, {"typical_p": 1, "store": True}).status_code == 200
    assert error_of(post(http, CHAT, {"regex": "a"}), 400)["param"] == "regex"
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    closed = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "TokenizeRequest", "SpeculationFields")
    assert [schemas[name]["additionalProperties"] for name in closed] == [False] * 5
    assert "something secret" not in daemon.log


@pytest.mark.parametrize(("path", "name"), LENGTHS)
def test_an_answer_longer_than_the_context_is_refused_by_the_name_that_was_sent(
    http: httpx.Client, path: str, name: str
) -> None:
    """Without --strict-fields it is cut (`openai/test_answer_length.py`)."""
    body = {key: value for key, value in BODIES[path].items() if not key.startswith("max_")}
    assert http.post(path, json={**body, name: 5}).status_code == 200
    answer = http.post(path, json={**body, name: 20 * MAX_POSITIONS})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert f"{name} asks for {20 * MAX_POSITIONS} more; lower {name}" in error["message"]
    if path != MESSAGES:
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")


def test_the_page_can_be_turned_off(http: httpx.Client) -> None:
    """Page, files and state are 404 then, and the root leads to the API's description."""
    assert http.head("/").headers["location"] == "docs"
    paths = ("/docs", "/dashboard", "/dashboard/state", "/dashboard/static/main.js")
    assert [http.get(path).status_code for path in paths] == [200, 404, 404, 404]


def test_a_model_may_have_several_names(http: httpx.Client) -> None:
    """Each is listed and answers under itself; metrics have the first."""
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, SECOND]
    assert http.get(f"/v1/models/{SECOND}").json()["id"] == SECOND
    for name in (MODEL, SECOND):
        answer = http.post("/v1/completions", json={"model": name, "prompt": "hello", "max_tokens": 2})
        assert answer.json()["model"] == name
    answer = http.post("/v1/completions", json={"model": "third", "prompt": "hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert set(re.findall(r'model_name="(\w+)"', http.get("/metrics").text)) == {MODEL}
