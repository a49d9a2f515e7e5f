"""The drawn bench result shows what was measured, and only that."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench import arms_of
from loadtest.plots import panels_of, plot

ARMS = ["bv_race:4x3", "bv_race:2x3", "block:1x3", "block:1x5", "traversal:2.2"]


@pytest.fixture
def result() -> dict[str, Any]:
    """Return dialogues and two lengths of random prompts, one and four at once.

    Every number identifies its place.
    """
    arms = arms_of(ARMS, 4, 5)
    cells = []
    for (task, context), concurrency in itertools.product([("dialogues", 0), ("random", 64), ("random", 1024)], [1, 4]):
        measured = {
            arm: {
                "tokens_per_second": 100.0 * concurrency + number,
                "ratio_to_off": {"ratio": 1 + context / 1024, "low": 0.9, "high": 2.1},
                "mean_acceptance_length": 2 + number / 10,
                "mean_acceptance_length_interval": [1.5, 3.5],
            }
            for number, arm in enumerate(arms)
        }
        cells.append({"task": task, "context": context, "concurrency": concurrency, "arms": measured})
    return {"options": {"arms": arms, "temperatures": [1.0]}, "cells": cells}


def test_the_panels_are_throughput_tokens_per_pass_and_gain(result: dict[str, Any]) -> None:
    panels = panels_of(result)
    assert [panel[0] for panel in panels] == [
        *["dialogues", "64 random tokens", "1024 random tokens"] * 2,
        "gain by context",
    ]
    assert panels[0][3]["bv_race:4x3"] == [(1, 101.0, 101.0, 101.0), (4, 401.0, 401.0, 401.0)]
    # block with chains of five was measured with one number of chains only.
    assert panels[3][3] == {
        "bv_race, 3 tokens a chain": [(2, 2.2, 1.5, 3.5), (4, 2.1, 1.5, 3.5)],
        "block, 3 tokens a chain": [(1, 2.3, 1.5, 3.5)],
    }
    assert panels[-1][3]["block:1x5, 4 at once"] == [(64, 1.0625, 0.9, 2.1), (1024, 2.0, 0.9, 2.1)]


def test_temperatures_have_lines_of_their_own(result: dict[str, Any]) -> None:
    cold = [cell | {"temperature": 0.0} for cell in result["cells"]]
    result["cells"] = [cell | {"temperature": 1.0} for cell in result["cells"]] + cold
    result["options"]["temperatures"] = [0.0, 1.0]
    assert set(panels_of(result)[-1][3]) >= {"block:1x5, 4 at once, T = 0", "block:1x5, 4 at once, T = 1"}
    assert all(len(points) == 2 for points in panels_of(result)[-1][3].values())


def test_throughput_at_one_concurrency_is_no_curve(result: dict[str, Any]) -> None:
    result["cells"] = result["cells"][::2]
    assert [panel[1] for panel in panels_of(result)] == [*["chains"] * 3, "tokens of the prompt"]


def test_a_result_without_chains_or_contexts_has_no_panels_for_them(result: dict[str, Any]) -> None:
    result["cells"] = result["cells"][:2]
    result["options"]["arms"] = {arm: result["options"]["arms"][arm] for arm in ("off", "block:1x5")}
    assert [panel[1] for panel in panels_of(result)] == ["requests at once"]


@pytest.mark.slow
def test_a_result_is_drawn_as_a_png(result: dict[str, Any], tmp_path: Path) -> None:
    plot(result, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
