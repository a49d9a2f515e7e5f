"""`speculation.return_drafts`: chains agree with the answer and its counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from tests.server.daemon_process import MODEL
from tests.server.event_stream import open_stream

PROMPT = [1, 5, 6, 7, 5, 6, 7, 5, 6]
KINDS: dict[str, dict[str, Any]] = {
    "chains": {"num_drafts": 3, "draft_length": 4},
    "one chain": {"rule": "block", "num_drafts": 1, "draft_length": 4},
    "tree": {"rule": "traversal", "tree": [2, 2, 1]},
    "text drafts alone": {"drafters": ["prompt_lookup"]},
    "text drafts": {"num_drafts": 1, "draft_length": 2, "drafters": ["model", "prompt_lookup"]},
}


def check(steps: list[dict[str, Any]], counted: dict[str, Any], num_tokens: int, text: str) -> None:
    """Check that accepted tokens begin one of the chains, and add up to the answer."""
    for step in steps:
        accepted = step["tokens"][: step["num_accepted"]]
        if step["chains"]:
            assert any(chain[: len(accepted)] == accepted for chain in step["chains"]), step
        else:
            assert step["num_accepted"] == 0
        assert len(step["drafters"]) == len(step["chains"])
    assert sum(len(step["tokens"]) for step in steps) == num_tokens
    assert sum(step["num_accepted"] for step in steps) == counted["num_accepted_draft_tokens"]
    assert sum(bool(step["chains"]) for step in steps) == counted["num_spec_steps"]
    assert max(len(chain) for step in steps for chain in step["chains"]) <= counted["num_spec_tokens"]
    assert text in "".join(token for step in steps for token in step["tokens"])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_steps_agree_with_the_answer(http: httpx.Client, kind: str) -> None:
    speculation = KINDS[kind] | {"return_drafts": True}
    call = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "seed": 4, "ignore_eos": True}
    whole = http.post("/v1/completions", json=call | {"speculation": speculation}).json()
    (choice,) = whole["choices"]
    check(choice["drafts"], whole["metrics"]["speculative_decoding"], 30, choice["text"])
    drafters = Counter(name for step in choice["drafts"] for name in step["drafters"])
    if "drafters" not in speculation:
        assert set(drafters) == {"model"}
        assert {len(step["chains"]) for step in choice["drafts"][:-2]} == {speculation.get("num_drafts", 4)}
    else:
        reported = whole["metrics"]["speculative_decoding"]["drafters"]
        assert drafters == {name: counts["num_drafts"] for name, counts in reported.items()}

    # The same seed: a stream has the same steps, one at a time, and an answer without them the same
    # text.
    with open_stream(http, "/v1/completions", **call, speculation=speculation) as stream:
        chunks = stream.read()
    streamed = [step for chunk in chunks for one in chunk["choices"] for step in one.get("drafts", [])]
    assert streamed == choice["drafts"]
    silent = http.post("/v1/completions", json=call | {"speculation": KINDS[kind]}).json()["choices"][0]
    assert silent["text"] == choice["text"]
    assert "drafts" not in silent


def test_a_chat_reports_drafts_of_every_choice(http: httpx.Client) -> None:
    call = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "n": 2, "seed": 4}
    call |= {"speculation": {"return_drafts": True, "num_drafts": 2, "draft_length": 2}}
    whole = http.post("/v1/chat/completions", json=call).json()
    for choice, counted in zip(whole["choices"], whole["metrics"]["choices"], strict=True):
        num_tokens = sum(len(step["tokens"]) for step in choice["drafts"])
        check(choice["drafts"], counted, num_tokens, choice["message"]["content"])
    with open_stream(http, "/v1/chat/completions", **call) as stream:
        chunks = stream.read()
    assert {one["index"] for chunk in chunks for one in chunk["choices"] if one.get("drafts")} == {0, 1}


def test_plain_steps_have_no_chains(http: httpx.Client) -> None:
    call = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    call |= {"speculation": {"enabled": False, "return_drafts": True}}
    (choice,) = http.post("/v1/completions", json=call).json()["choices"]
    assert [(step["chains"], len(step["tokens"])) for step in choice["drafts"]] == [([], 1)] * 5


def test_responses_refuse_it_by_name(http: httpx.Client) -> None:
    call = {"model": MODEL, "input": "hello", "speculation": {"return_drafts": True}}
    answer = http.post("/v1/responses", json=call)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculation.return_drafts"
