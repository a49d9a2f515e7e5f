"""`analyze reports`: speedups that answers report, compared with plain answers to the same
requests, in turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from analysis import reports
from analysis.__main__ import main
from analysis.arms import Arm
from analysis.turns import Turn
from loadtest.arms import ADAPTIVE, AGAIN, OFF
from tests.server.tiny_models import write_pair

TOKENS = 150


@dataclass
class FakeArm:
    """Answers of 150 tokens, with a fixed number of tokens per step of a second; reports who
    stepped when.
    """

    name: str
    tokens: int
    steps: list[str]
    reported_speedup: float = 0.0
    shapes: dict[str, float] = field(default_factory=lambda: {"1x3": 1.0})
    left: int = 0

    @property
    def engine(self) -> Any:
        telemetry = SimpleNamespace(pause=lambda: None)
        return SimpleNamespace(telemetry=telemetry, scheduler=SimpleNamespace(has_work=self.left > 0))

    def forget(self) -> None:
        assert self.left == 0

    def step(self, concurrency: int) -> Turn:
        assert concurrency == 1
        self.left = self.left or TOKENS
        count = min(self.tokens, self.left)
        self.left -= count
        self.steps.append(self.name)
        return Turn(1.0, count)


def arms_of(steps: list[str]) -> Mapping[str, Arm]:
    fakes = [FakeArm(OFF, 1, steps), FakeArm(AGAIN, 1, steps), FakeArm(ADAPTIVE, 3, steps, 3.3)]
    fakes += [FakeArm("plainly", 1, steps, 1.0, {OFF: 1.0})]
    return cast(Mapping[str, Arm], {one.name: one for one in fakes})


def test_all_arms_answer_one_request_a_few_tokens_at_a_time() -> None:
    steps: list[str] = []
    seconds = reports.answer_in_turns(arms_of(steps), random.Random(1))
    assert seconds == {OFF: TOKENS, AGAIN: TOKENS, ADAPTIVE: TOKENS / 3, "plainly": TOKENS}
    first = steps[: 3 * 64 + 22]
    assert [first.count(name) for name in (OFF, AGAIN, ADAPTIVE, "plainly")] == [64, 64, 22, 64]


def test_what_is_reported_is_held_against_the_time_of_plain_answers() -> None:
    found = reports.compare(arms_of([]), 6)
    assert found["noise_of_two_plain_runs"] == {"median": 0.0, "p90": 0.0}
    adaptive = found["arms"][ADAPTIVE]
    assert adaptive["pairs"] == [{"reported": 3.3, "actual": 3.0}] * 6
    assert adaptive["error"] == pytest.approx(0.1)
    assert adaptive["absolute_error"] == pytest.approx({"median": 0.1, "p90": 0.1})
    assert found["arms"]["plainly"] == {"pairs": []}, "an answer that was decoded plainly reports nothing"
    rows = reports.markdown({"cells": [{"concurrency": 1, **found}]}).splitlines()
    assert rows[2:] == [
        "| 1 | adaptive | +10.0% | 10.0% | 10.0% |",
        "| 1 | plainly | 0 answers had drafts | - | - |",
        "| 1 | plain and plain |  | 0.0% | 0.0% |",
    ]


@pytest.mark.slow
def test_a_pair_of_models_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = write_pair(tmp_path)
    output = tmp_path / "found" / "reports.json"
    options = ["--target", str(pair.target), "--draft", str(pair.draft), "--prompts", "random:8", "--tokens", "8"]
    options += ["--arms", "block:1x2", "--threads", "1"]
    assert main(["reports", *options, "--answers", "2"]) == 2
    assert "--answers must be at least 3" in capsys.readouterr().err
    assert main(["reports", *options, "--answers", "3", "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written == json.loads(capsys.readouterr().out)
    pairs = written["cells"][0]["arms"]["block:1x2"]["pairs"]
    assert len(pairs) == 3
    assert all(pair["reported"] > 0 < pair["actual"] for pair in pairs)
