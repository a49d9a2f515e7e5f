"""The bound of an answer under each name, cut to the room in the context."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.daemon_process import MODEL, Daemons
from tests.server.good_bodies import CHAT, COMPLETIONS, LENGTHS, MESSAGES, RESPONSES, error_of
from tests.server.tiny_models import BOS, MAX_POSITIONS

HEADER = "x-polydraft-max-tokens"
USER = {"messages": [{"role": "user", "content": "hello"}]}
NEAR = [BOS] + [9] * (MAX_POSITIONS - 4)
"""Prompt that leaves room for three tokens."""


def ask(client: httpx.Client, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
    return client.post(path, json={"model": MODEL, "seed": 3, **body, **more})


def with_length(client: httpx.Client, num_tokens: int) -> dict[str, Any]:
    """Return a conversation whose prompt has this many tokens."""

    def counted(text: str) -> tuple[int, dict[str, Any]]:
        body = {"messages": [{"role": "user", "content": text}]}
        answer = client.post(f"{MESSAGES}/count_tokens", json={"model": MODEL, **body})
        return int(answer.json()["input_tokens"]), body

    least, _ = counted("x")
    count, body = counted("x" + " x" * (num_tokens - least))
    assert count == num_tokens
    return body


@pytest.fixture(scope="module")
def long(daemons: Daemons, pair_arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Prompts that leave room for few tokens, by endpoint."""
    with daemons.get(*pair_arguments, "--no-calibrate").client() as client:
        near = with_length(client, MAX_POSITIONS - 6)
    return {CHAT: near, COMPLETIONS: {"prompt": NEAR}, RESPONSES: {"input": near["messages"]}, MESSAGES: near}


@pytest.mark.sampled
@pytest.mark.parametrize(("path", "name"), LENGTHS)
def test_a_bound_beyond_the_context_is_cut_to_its_room(
    http: httpx.Client, long: dict[str, dict[str, Any]], path: str, name: str
) -> None:
    """Header and metrics have the bound that applies, also in streams."""
    body = long[path]
    whole = ask(http, path, body, **{name: 20 * MAX_POSITIONS})
    assert whole.status_code == 200, whole.text
    usage, room = whole.json()["usage"], int(whole.headers[HEADER])
    num_prompt = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert room == whole.json()["metrics"]["max_tokens"] == MAX_POSITIONS - num_prompt
    streamed = ask(http, path, body, stream=True, **{name: room + 1})
    assert streamed.headers[HEADER] == str(room)
    assert f'"max_tokens":{room}' in streamed.text
    fits = ask(http, path, body, **{name: room})
    assert HEADER not in fits.headers
    assert "max_tokens" not in fits.json()["metrics"]


@pytest.mark.slow
def test_full_context_has_its_finish_reason(http: httpx.Client) -> None:
    """Each API has its reason, and the count of cut calls rises."""

    def num_cut() -> float:
        (line,) = [line for line in http.get("/metrics").text.splitlines() if "max_tokens_cut_total{" in line]
        return float(line.split()[-1])

    before = num_cut()
    several = ask(http, COMPLETIONS, {"prompt": [NEAR[:-2], NEAR]}, max_tokens=999_999, ignore_eos=True, n=2)
    choices = several.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 4
    assert several.json()["usage"]["completion_tokens"] == 2 * (5 + 3)
    assert several.headers[HEADER] == "3"
    near = with_length(http, MAX_POSITIONS - 2)
    chat = ask(http, CHAT, near, max_tokens=32_000, ignore_eos=True).json()
    assert (chat["choices"][0]["finish_reason"], chat["usage"]["completion_tokens"]) == ("length", 2)
    response = ask(http, RESPONSES, {"input": near["messages"]}, max_output_tokens=32_000, ignore_eos=True).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    message = ask(http, MESSAGES, near, max_tokens=32_000).json()
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("model_context_window_exceeded", 2)
    assert num_cut() - before == 4
    assert ask(http, MESSAGES, near, max_tokens=2).json()["stop_reason"] == "max_tokens"


@pytest.mark.slow
def test_prompts_without_room_for_an_answer_are_refused_by_their_field(http: httpx.Client) -> None:
    full = with_length(http, MAX_POSITIONS)
    for path, body, name, field in (
        (CHAT, full, "max_tokens", "messages"),
        (COMPLETIONS, {"prompt": [*NEAR, 9, 9, 9]}, "max_tokens", "prompt"),
        (RESPONSES, {"input": full["messages"]}, "max_output_tokens", "input"),
    ):
        error = error_of(ask(http, path, body, **{name: 32_000}), 400)
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert "no room for an answer" in error["message"]
        assert error_of(ask(http, path, body), 400)["param"] == field
    assert ask(http, COMPLETIONS, {"prompt": [*NEAR, 9, 9, 9]}, max_tokens=0).status_code == 200


@pytest.mark.slow
def test_other_bounds_refuse_what_the_room_cannot_hold(http: httpx.Client) -> None:
    """A minimum that the cut would undo, and a prompt that would be cut away for the answer."""
    for body in ({"max_tokens": 32_000, "min_tokens": 4}, {"max_completion_tokens": 32_000, "min_tokens": 4}):
        error = error_of(ask(http, COMPLETIONS, {"prompt": NEAR}, **body), 400)
        assert (error["param"], error["code"]) == ("min_tokens", "context_length_exceeded")
    assert ask(http, COMPLETIONS, {"prompt": NEAR}, max_tokens=32_000, min_tokens=3).status_code == 200
    error = error_of(ask(http, CHAT, USER, max_completion_tokens=4, min_tokens=5), 400)
    assert "at most max_completion_tokens = 4" in error["message"]
    cut = {"prompt": NEAR, "truncate_prompt_tokens": -1}
    error = error_of(ask(http, COMPLETIONS, cut, max_tokens=MAX_POSITIONS), 400)
    assert error["param"] == "max_tokens"
    assert ask(http, COMPLETIONS, cut, max_tokens=MAX_POSITIONS - 1).json()["usage"]["prompt_tokens"] == 1
