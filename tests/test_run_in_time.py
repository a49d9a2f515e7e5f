"""A run that must end in time begins no late test; another word puts other files first."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import FOLDER, LAST, LONG, pytest_collection_modifyitems


def order_of(word: str | None) -> list[Any]:
    """Names of sorted tests, two of each of ten files."""
    files = [LAST, *(f"a/test_{number}" for number in range(7)), LONG[1], LONG[0]]
    items: list[Any] = [SimpleNamespace(path=FOLDER / f"{file}.py", name=name) for file in files for name in "xy"]
    config: Any = SimpleNamespace(getoption={"--order": word}.get)
    pytest_collection_modifyitems(config, items)
    return [(str(item.path.relative_to(FOLDER).with_suffix("")), item.name) for item in items]


def test_long_files_go_first_and_one_last() -> None:
    order = order_of(None)
    assert order[:5] == [(LONG[0], "x"), (LONG[0], "y"), (LONG[1], "x"), (LONG[1], "y"), ("a/test_0", "x")]
    assert order[-2:] == [(LAST, "x"), (LAST, "y")]


def test_each_word_has_an_order_in_which_files_stay_together() -> None:
    orders = {word: order_of(word) for word in ("one", "two")}
    assert orders["one"] == order_of("one")
    assert orders["one"] != orders["two"]
    assert sorted(orders["one"]) == sorted(orders["two"]) == sorted(order_of(None))
    for order in orders.values():
        assert [name for _, name in order] == ["x", "y"] * 10
        assert all(first[0] == second[0] for first, second in zip(order[::2], order[1::2], strict=True))


@pytest.mark.parametrize(("minutes", "outcome"), [("-3", "skipped"), ("0", "skipped"), ("60", "passed")])
def test_no_test_begins_late(minutes: str, outcome: str) -> None:
    """In a run of one test of this file."""
    words = ["-q", "-n0", "-pno:cacheprovider", "--minutes", minutes, __file__, "-k", "long_files"]
    run = subprocess.run([sys.executable, "-m", "pytest", *words], capture_output=True, text=True, cwd=FOLDER.parent)
    assert run.returncode == 0, run.stdout
    assert f"1 {outcome}, " in run.stdout
    assert (f"not begun within {minutes} minutes" in run.stdout) == (outcome == "skipped")
