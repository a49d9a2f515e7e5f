"""Completions of the tiny pair, speculation in every shape, and the counts of their answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.daemon_process import MODEL
from tests.server.good_bodies import COMPLETIONS

CALL: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 40, "seed": 4, "ignore_eos": True}
OFF = {"enabled": False}


def answer_of(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The body of a whole completion."""
    response = http.post(COMPLETIONS, json={**CALL, **more})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def refusal_of(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The error of a completion that must be refused."""
    response = http.post(COMPLETIONS, json={**CALL, **more})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def check_counts(counted: dict[str, Any], num_answer_tokens: int) -> None:
    """Assert that histogram, sums and means agree with each other and with the answer's length."""
    histogram = counted["acceptance_histogram"]
    assert len(histogram) == counted["num_spec_tokens"] + 1
    assert sum(histogram) == counted["num_spec_steps"] > 0
    accepted = sum(length * count for length, count in enumerate(histogram))
    assert accepted == counted["num_accepted_draft_tokens"] <= counted["num_draft_tokens"]
    assert counted["draft_acceptance_rate"] == pytest.approx(accepted / counted["num_draft_tokens"], abs=5e-4)
    # Each step gives its accepted tokens and at most one more, the last token of all maybe without
    # speculation.
    emitted = round(counted["mean_acceptance_length"] * counted["num_spec_steps"])
    assert accepted <= emitted <= accepted + counted["num_spec_steps"]
    assert emitted == pytest.approx(num_answer_tokens, abs=1)
    assert 0 <= counted["draft_time_share"] <= 1
    by_drafter = counted["drafters"]["model"]
    assert by_drafter["num_accepted_tokens"] == accepted
    assert by_drafter["num_draft_tokens"] == counted["num_draft_tokens"]


SHAPES: dict[str, dict[str, Any]] = {
    "off": {"enabled": False},
    "token": {"rule": "token"},
    "block": {"rule": "block"},
    "bv_race": {"rule": "bv_race", "num_drafts": 4},
    "tree": {"rule": "traversal", "tree": [2, 2, 1]},
}
