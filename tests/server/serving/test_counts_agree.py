"""The daemon's counters grow by what the answers say of themselves, whatever cuts the answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.daemon_process import MODEL
from tests.server.event_stream import open_stream
from tests.server.scraped_metrics import check, scraped
from tests.server.tiny_models import EOS

CALL: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 40, "temperature": 1.0}


def cut_inside_runs(http: httpx.Client, **more: Any) -> list[dict[str, Any]]:
    """Answers of several seeds."""
    calls = [{**CALL, "seed": seed, "speculation": {"num_drafts": 3, "draft_length": 5}, **more} for seed in range(12)]
    return [http.post("/v1/completions", json=call).raise_for_status().json() for call in calls]


LOOKUP = {"prompt": "one two three one two three one two three one two", "temperature": 0}
CUTS: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ["e", "a"]},
    "stop string across tokens": {"stop": ["e ", "th"], "n": 3},
    "stop string included": {"stop": ["o"], "include_stop_str_in_output": True},
    "length": {"max_tokens": 7, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "end token": {"logit_bias": {str(EOS): 7}, "n": 2},
    "stop token": {"stop_token_ids": list(range(100, 2000, 3))},
    "no answer": {"max_tokens": 0, "echo": True, "n": 2},
    "text drafts": {**LOOKUP, "stop": ["o", "wo"], "speculation": {"drafters": ["model", "prompt_lookup"]}},
    "text drafts alone": {**LOOKUP, "max_tokens": 11, "speculation": {"drafters": ["prompt_lookup"]}},
}


@pytest.mark.sampled
@pytest.mark.parametrize("cut", CUTS)
def test_the_counters_are_the_sums_of_the_answers(http: httpx.Client, cut: str) -> None:
    before = scraped(http)
    answers = cut_inside_runs(http, **CUTS[cut])
    check(http, before, answers)


def test_counts_end_with_the_call(http: httpx.Client) -> None:
    """One call is asked for: tokens that a step has accepted after its end count nowhere."""
    day = {"day": {"enum": ["Monday", "Tuesday"]}}
    parameters = {"type": "object", "properties": day, "required": ["day"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "plan", "parameters": parameters}}
    call = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Which day?"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "n": 8,
        "seed": 1,
        "speculation": {"num_drafts": 3, "draft_length": 5},
    }
    before = scraped(http)
    answer = http.post("/v1/chat/completions", json=call).raise_for_status().json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls"] * 8
    check(http, before, [answer])


def test_cuts_come_inside_accepted_runs(http: httpx.Client) -> None:
    """Otherwise the test above would compare equal things."""
    answers = cut_inside_runs(http, **CUTS["stop string"], return_token_ids=True)
    drafted = cut_inside_runs(http, stop=None, return_token_ids=True)
    assert any(
        len(cut["choices"][0]["token_ids"]) < len(whole["choices"][0]["token_ids"])
        for cut, whole in zip(answers, drafted, strict=True)
    )


def test_an_answer_whose_client_leaves_is_counted_once(http: httpx.Client) -> None:
    """The client has seen no more tokens than are counted."""
    before = scraped(http)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {**CALL, "max_tokens": 300, "ignore_eos": True, "stream_options": usage}
    with open_stream(http, "/v1/completions", **body) as events:
        seen = [next(events) for _ in range(5)][-1]["usage"]["completion_tokens"]
    grown = scraped(http)
    grown.subtract(before)
    assert grown["tokens"] >= seen
    assert grown["tokens"] == grown["page tokens"]
    assert grown["accepted"] == grown["positions"] == grown["vllm"] <= grown["tokens"]
