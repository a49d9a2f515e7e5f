"""`analyze around`: time of a step by part."""

from __future__ import annotations

import importlib
import time

import pytest

from analysis import around
from analysis.around import PARTS, Shares, TurnSums


def test_time_of_an_inner_part_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    shares = Shares()
    inner = shares.timed("inner", lambda: "found")
    outer = shares.timed("outer", lambda: [inner(), inner()])
    assert outer() == ["found", "found"]
    # The clock ticks once whenever a part begins or ends.
    assert shares.seconds == {"outer": 3.0, "inner": 2.0}


def test_generator_does_its_work_in_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    shares = Shares()
    inner = shares.timed("inner", lambda: 1)
    outer = shares.timed("outer", lambda: (inner() for _ in range(2)))
    assert list(outer()) == [1, 1]
    assert shares.seconds == {"outer": 3.0, "inner": 2.0}


@pytest.mark.parametrize("place", [place for places in PARTS.values() for place in places])
def test_parts_are_functions_of_the_engine(place: str) -> None:
    module, _, path = place.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)


def test_table_has_medians_of_turns_and_leaves_the_passes_out() -> None:
    turns = [
        TurnSums(10, {"passes": 1.0, "plan": seconds, "commit": 0.01}, num_nodes=30, num_tokens=20)
        for seconds in (0.01, 0.02, 0.09)
    ]
    found = around.table(turns)
    assert found["parts_ms"]["plan"] == pytest.approx(2.0)
    assert found["parts_ms"]["passes"] == pytest.approx(100.0)
    assert found["around_ms"] == pytest.approx(3.0)
    assert (found["nodes_a_step"], found["tokens_a_step"]) == (3.0, 2.0)
