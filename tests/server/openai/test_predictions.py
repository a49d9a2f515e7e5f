"""Predicted outputs and prompt lookup over HTTP: the same text in fewer steps."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.completions import answer_of, refusal_of
from tests.server.daemon_process import MODEL

SHAPES: dict[str, dict[str, Any]] = {
    "off": {"drafters": ["prediction"]},
    "token": {"rule": "token"},
    "block": {"rule": "block"},
    "bv_race": {"rule": "bv_race"},
    "tree": {"rule": "traversal", "tree": [2, 2, 1]},
}


def predicted(text: str) -> dict[str, str]:
    return {"type": "content", "content": text}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_prediction_gives_the_same_text_in_fewer_steps(http: httpx.Client, shape: str) -> None:
    plain = answer_of(http, temperature=0, speculation={"enabled": False})
    text = plain["choices"][0]["text"]
    usual = answer_of(http, temperature=0)["metrics"]["speculative_decoding"]["num_spec_steps"]
    answer = answer_of(http, temperature=0, prediction=predicted(text), speculation=SHAPES[shape])
    counted = answer["metrics"]["speculative_decoding"]
    assert answer["choices"] == plain["choices"]
    assert counted["num_spec_steps"] <= usual / 2
    assert counted["drafters"]["prediction"]["num_accepted_tokens"] > 20
    assert ("model" in counted["drafters"]) == (shape != "off")
    assert sum(one["num_draft_tokens"] for one in counted["drafters"].values()) == counted["num_draft_tokens"]
    assert sum(one["num_accepted_tokens"] for one in counted["drafters"].values()) == sum(
        length * count for length, count in enumerate(counted["acceptance_histogram"])
    )
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 30
    assert details["rejected_prediction_tokens"] < 10


def test_a_wrong_prediction_is_counted_as_rejected(openai_client: openai.OpenAI) -> None:
    """The official client gets them, also with several choices; the prediction may have parts."""
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a story."}],
        prediction={
            "type": "content",
            "content": [{"type": "text", "text": "zq xj"}, {"type": "text", "text": " vvk"}],
        },
        max_completion_tokens=8,
        n=2,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    rejected = answer.usage.completion_tokens_details.rejected_prediction_tokens
    assert rejected is not None
    assert rejected >= 6
    assert rejected % 2 == 0, "the same tokens for both choices"


def test_prompt_lookup_for_one_request(http: httpx.Client) -> None:
    """A text that repeats itself is found again."""
    wish = {"temperature": 0, "allowed_token_ids": [300, 301], "max_tokens": 60}
    plain = answer_of(http, **wish, speculation={"enabled": False})
    answer = answer_of(http, **wish, speculation={"drafters": ["prompt_lookup"]})
    counted = answer["metrics"]["speculative_decoding"]
    assert answer["choices"] == plain["choices"]
    assert list(counted["drafters"]) == ["prompt_lookup"]
    assert counted["mean_acceptance_length"] > 2


def test_fields_that_exclude_each_other_are_refused(http: httpx.Client) -> None:
    for speculation, param in (
        ({"enabled": False}, "prediction"),
        ({"drafters": ["model"]}, "prediction"),
        ({"rule": "spectr_gbv"}, "speculation.rule"),
    ):
        assert refusal_of(http, prediction=predicted("x"), speculation=speculation)["param"] == param
    assert refusal_of(http, prediction={"type": "content", "content": [{"type": "image_url"}]})["param"] == "prediction"
