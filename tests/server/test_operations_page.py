"""docs/operations.md names every field: of requests, and of the metrics in answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.execution.loading import FITTING_MODEL_TYPES
from server.answers import Metrics, SpeculativeDecoding
from server.protocol import ChatRequest, CompletionRequest, SpeculationFields
from server.responses import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
NAMED = frozenset(re.findall(r"[a-z_]+", PAGE))


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, ResponsesRequest, SpeculationFields])
def test_every_field_of_a_request_is_on_the_page(body: type) -> None:
    assert not sorted(set(body.model_fields) - NAMED)  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", [Metrics, SpeculativeDecoding])
def test_every_field_of_the_metrics_has_its_row(part: type) -> None:
    rows = frozenset(re.findall(r"^\| ([a-z_]+) \|", PAGE, re.MULTILINE))
    assert not sorted(set(part.__struct_fields__) - rows)  # type: ignore[attr-defined]


def test_the_families_on_the_page_are_those_that_are_served() -> None:
    paragraph = PAGE[PAGE.index("Families, by the `model_type`") :].partition("\n## ")[0]
    lists = re.findall(r":((?:\s+[a-z0-9_-]+,?)+)\.", paragraph)
    assert frozenset(re.findall(r"[a-z0-9_-]+", " ".join(lists))) == FITTING_MODEL_TYPES
