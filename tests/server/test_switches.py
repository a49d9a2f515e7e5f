"""Flags that change what a daemon accepts and shows, all set on one daemon."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.server.daemon_process import MODEL, Daemon, Daemons
from tests.server.test_bad_requests import CHAT, error_of
from tests.server.test_extra_fields import BODIES, RESPONSES, post

SECOND = "second"


@pytest.fixture(scope="module")
def daemon(daemons: Daemons, pair_arguments: list[str]) -> Daemon:
    names = ["--served-model-name", SECOND]
    return daemons.get(*pair_arguments, *names, "--no-calibrate", "--no-dashboard", "--allow-unknown-fields")


@pytest.fixture
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    with daemon.client() as client:
        yield client


def test_an_operator_may_allow_unknown_names(daemon: Daemon, http: httpx.Client) -> None:
    """Then one line names them, and no value; what is known and not served stays refused."""
    for path in sorted(BODIES):
        assert post(http, path, {"of_next_month": "something secret"}).status_code == 200
    assert post(http, RESPONSES, {"logprobs": "all"}).status_code == 200, "a chat's field, unknown here"
    assert error_of(post(http, CHAT, {"regex": "a"}), 400)["param"] == "regex"
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is True
    lines = [line for line in daemon.log.splitlines() if "of_next_month" in line]
    assert len(lines) == 1, lines
    assert "WARNING request fields that this server does not know were ignored: of_next_month" in lines[0]
    assert "something secret" not in daemon.log


def test_the_page_can_be_turned_off(http: httpx.Client) -> None:
    """Page and state are 404 then, and the root leads to the API's description."""
    assert http.head("/").headers["location"] == "docs"
    assert [http.get(path).status_code for path in ("/dashboard", "/dashboard/state")] == [404, 404]


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
