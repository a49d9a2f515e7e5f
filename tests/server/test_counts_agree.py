"""The daemon's counters grow by what the answers say of themselves, whatever cuts the answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from engine.api import DRAFTERS
from tests.server.daemon_process import MODEL, wait_until
from tests.server.event_stream import open_stream
from tests.server.test_metrics_exposition import samples_of
from tests.server.tiny_models import EOS

CALL: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 40, "temperature": 1.0}
NAMES = {
    "steps": "polydraft_spec_decode_num_drafts_total",
    "drafted": "polydraft_spec_decode_num_draft_tokens_total",
    "accepted": "polydraft_spec_decode_num_accepted_tokens_total",
    "tokens": "polydraft_generation_tokens_total",
    "prompts": "polydraft_prompt_tokens_total",
    "positions": "polydraft_spec_decode_num_accepted_tokens_per_pos_total",
    "shapes": "polydraft_spec_shape_steps_total",
    "trees": "polydraft_spec_tree_nodes_count",
    "nodes": "polydraft_spec_tree_nodes_sum",
    "vllm": "vllm:spec_decode_num_accepted_tokens_total",
}


def scraped(http: httpx.Client) -> Counter[str]:
    """The counters, once no request runs."""
    running = "polydraft_num_requests_running"
    samples = wait_until(
        lambda: (
            [s for s in found if s.value == s.value]
            if (found := samples_of(http.get("/metrics").text)) and not sum(s.value for s in found if s.name == running)
            else None
        ),
        "requests still run",
    )
    sums: Counter[str] = Counter()
    for name, metric in NAMES.items():
        sums[name] = int(sum(s.value for s in samples if s.name == metric))
    for drafter in DRAFTERS:
        for kind in ("drafts", "draft_tokens", "accepted_tokens"):
            metric = f"polydraft_spec_drafter_{kind}_total"
            sums[f"{drafter} {kind}"] = int(
                sum(s.value for s in samples if s.name == metric and s.labels.get("drafter") == drafter)
            )
    totals = http.get("/dashboard/state").json()["totals"]
    return sums + Counter({f"page {name}": round(totals[name]) for name in ("tokens", "passes", "spec_steps")})


def told(answer: dict[str, Any]) -> Counter[str]:
    """Return an answer's counts under the same names."""
    usage, counted = answer["usage"], answer["metrics"]["speculative_decoding"]
    if counted is None:  # nothing was drafted
        num_tokens, num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        return Counter(
            {"tokens": num_tokens, "page tokens": num_tokens, "prompts": num_prompt, "page passes": num_tokens}
        )
    sums = Counter(
        {
            "steps": counted["num_spec_steps"],
            "drafted": counted["num_draft_tokens"],
            "accepted": counted["num_accepted_draft_tokens"],
            "tokens": usage["completion_tokens"],
            "prompts": usage["prompt_tokens"],
            "positions": sum(length * count for length, count in enumerate(counted["acceptance_histogram"])),
            "trees": counted["num_spec_steps"],
            "nodes": counted["num_draft_tokens"],
            "vllm": counted["num_accepted_draft_tokens"],
            "page tokens": usage["completion_tokens"],
            "page spec_steps": counted["num_spec_steps"],
            "page passes": counted["num_passes"],
        }
    )
    for drafter, counts in counted["drafters"].items():
        sums[f"{drafter} drafts"] = counts["num_drafts"]
        sums[f"{drafter} draft_tokens"] = counts["num_draft_tokens"]
        sums[f"{drafter} accepted_tokens"] = counts["num_accepted_tokens"]
    return sums


def check(http: httpx.Client, before: Counter[str], answers: list[dict[str, Any]]) -> None:
    """Assert that the counters have grown by the sum over the answers."""
    grown = scraped(http)
    grown.subtract(before)
    shapes = grown.pop("shapes")
    assert shapes >= grown["steps"], "every speculative step has a shape"
    assert shapes == grown["page passes"] or grown["tokens"] == 0, "a step of an answer is a pass"
    assert +grown == sum((told(answer) for answer in answers), Counter[str]())


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
    """Otherwise the test above would compare equal things: some stop strings end inside a step's tokens."""
    answers = cut_inside_runs(http, **CUTS["stop string"], return_token_ids=True)
    drafted = cut_inside_runs(http, stop=None, return_token_ids=True)
    assert any(
        len(cut["choices"][0]["token_ids"]) < len(whole["choices"][0]["token_ids"])
        for cut, whole in zip(answers, drafted, strict=True)
    )


def test_an_answer_whose_client_leaves_is_counted_once(http: httpx.Client) -> None:
    """The client of a stream has seen no more tokens than are counted, and what came later counts nowhere."""
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
