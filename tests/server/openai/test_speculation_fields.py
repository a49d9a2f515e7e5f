"""Speculation of requests to a server without a draft model."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import DRAFTERS, SpeculationConfig, with_fixed_shape
from engine.request import Speculation
from server.openai.sampling_fields import check_earlier_answers, speculation_of
from server.wire.errors import RequestError
from server.wire.fields import CompletionRequest
from tests.engine import tiny

FACTS = tiny.build(tiny.llama(1, layers=1), None).facts


def speculation(asked: dict[str, Any], **settings: Any) -> Speculation:
    """Return the speculation of a request."""
    body = CompletionRequest.model_validate({"prompt": "text", "speculation": asked})
    return speculation_of(body, SpeculationConfig(**settings), FACTS)


@pytest.mark.parametrize(
    "asked", [{}, {"enabled": True}, {"return_drafts": True}, {"enabled": True, "return_drafts": True}]
)
def test_drafts_if_anything_drafts_are_plain_decoding(asked: dict[str, Any]) -> None:
    """The live page and `polydraft chat` ask so; text drafts are used if there are any."""
    assert speculation(asked) == Speculation()
    assert speculation(asked, drafters=("prompt_lookup",)).drafters == ("prompt_lookup",)


def test_all_drafters_may_be_asked_for_together() -> None:
    body = CompletionRequest.model_validate({"prompt": "text", "speculation": {"drafters": list(DRAFTERS)}})
    assert body.speculation is not None
    assert body.speculation.drafters == list(DRAFTERS)


@pytest.mark.parametrize("asked", [{"rule": "block"}, {"num_drafts": 2}, {"drafters": ["model"]}, {"tree": [2, 1]}])
def test_drafts_of_the_model_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no draft model; leave it out"):
        speculation(asked)


@pytest.mark.parametrize("asked", [{"num_drafts": 2}, {"draft_length": 3}, {"tree": [2, 1]}])
def test_shapes_of_drafts_of_the_model_are_refused_if_texts_draft(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"^speculation\.{next(iter(asked))}: .*; leave it out"):
        speculation(asked, drafters=("prompt_lookup",))


def test_earlier_answers_draft_for_requests_that_the_engine_adapts() -> None:
    asked = {"drafters": ["earlier_answers"]}
    assert speculation(asked, adaptive=True).adaptive
    assert not speculation({"drafters": ["prompt_lookup"]}, adaptive=True).adaptive


@pytest.mark.parametrize("drafters", [["earlier_answers"], ["prompt_lookup", "earlier_answers"]])
def test_earlier_answers_that_could_not_draft_are_refused(drafters: list[str]) -> None:
    body = CompletionRequest.model_validate({"prompt": "text", "speculation": {"drafters": drafters}})
    adapted = speculation_of(body, SpeculationConfig(adaptive=True), FACTS)
    check_earlier_answers(body, adapted)
    with pytest.raises(RequestError, match="leave out seed"):
        check_earlier_answers(body, with_fixed_shape(adapted, SpeculationConfig(), "cpu"))
    # The server's default is no wish of the request.
    plain = CompletionRequest.model_validate({"prompt": "text"})
    by_default = speculation_of(plain, SpeculationConfig(drafters=tuple(drafters)), FACTS)
    check_earlier_answers(plain, by_default)
    assert "earlier_answers" in by_default.drafters
