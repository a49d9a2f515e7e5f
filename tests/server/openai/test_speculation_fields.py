"""Speculation of requests to a server without a draft model."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import SpeculationConfig
from engine.request import Speculation
from server.openai.sampling_fields import speculation_of
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
    """The live page and `polydraft chat` ask for such drafts; text drafts are used if the server
    has them.
    """
    assert speculation(asked) == Speculation()
    assert speculation(asked, drafters=("prompt_lookup",)).drafters == ("prompt_lookup",)


@pytest.mark.parametrize("asked", [{"rule": "block"}, {"num_drafts": 2}, {"drafters": ["model"]}, {"tree": [2, 1]}])
def test_drafts_of_the_model_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="without a draft model"):
        speculation(asked)
