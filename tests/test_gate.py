"""The gate leaves out what takes long, chooses cases by the commit, and ends in time."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, cpu_time
from tests.grid import mark_slow, slow_fixture

README = conftest.FOLDER / "README.md"
LONGEST_S = 1.5
SOLE = re.compile(r'mark\.sole\("(.+)"\)')


def sole_tests() -> str:
    """Rows of a table: a capability, and the file of the gate's only test of it."""
    files = sorted(conftest.FOLDER.rglob("test_*.py"))
    marks = [(name, file.relative_to(conftest.FOLDER)) for file in files for name in SOLE.findall(file.read_text())]
    rows = [f"| {name} | `{file}` |" for name, file in marks if file.name != "test_gate.py"]
    return "\n".join(["| capability | file |", "| --- | --- |", *rows, ""])


class Case:
    """A test case as pytest collects it, as far as the gate looks at it."""

    def __init__(self, name: str, *marks: pytest.MarkDecorator, parameters: dict[str, Any] | None = None) -> None:
        self.nodeid = name
        self.marks = [mark.mark for mark in marks]
        self.callspec = SimpleNamespace(params=parameters or {})
        self.stash = pytest.Stash()

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)

    @property
    def is_slow(self) -> bool:
        return self.get_closest_marker("slow") is not None


def chosen(cases: list[Any], seed: str) -> list[str]:
    """Names of the cases that the gate runs."""
    mark_slow(cases, seed)
    return [case.nodeid for case in cases if not case.is_slow]


def rules(*marks: pytest.MarkDecorator) -> list[Case]:
    """Cases of a test over three rules and four numbers of drafts."""
    grid = itertools.product("abc", range(4))
    return [Case(f"test[{rule}{drafts}]", *marks, parameters={"rule": rule}) for rule, drafts in grid]


def test_one_case_of_a_sampled_test_is_chosen_by_the_commit() -> None:
    choices = [chosen(rules(pytest.mark.sampled), f"commit {number}") for number in range(40)]
    assert {len(names) for names in choices} == {1}
    assert len({name for (name,) in choices}) > 6
    assert choices[0] == chosen(rules(pytest.mark.sampled), "commit 0")


def test_one_case_of_each_value_is_chosen() -> None:
    names = chosen(rules(pytest.mark.sampled("rule")), "commit")
    assert [name[5] for name in names] == ["a", "b", "c"]


def test_slow_cases_are_not_chosen() -> None:
    cases = rules(pytest.mark.sampled)
    for case in cases[1:]:
        case.add_marker(pytest.mark.slow)
    assert chosen(cases, "commit") == ["test[a0]"]


def test_tests_of_slow_fixtures_are_slow_unless_they_are_sole() -> None:
    fixtures = SimpleNamespace(name2fixturedefs={"daemon": [SimpleNamespace(func=slow_fixture(lambda: None))]})
    cases = [Case("usual"), Case("sole", pytest.mark.sole("a protocol"))]
    for case in cases:
        case._fixtureinfo = fixtures  # type: ignore[attr-defined]
    assert chosen(cases, "commit") == ["sole"]


def outcome(spent_s: float, *marks: pytest.MarkDecorator) -> str:
    """Outcome of a test that passed after some CPU time."""
    item: Any = Case("test", *marks)
    item.config = SimpleNamespace(getoption={"--cpu-limit": LONGEST_S}.get)
    item.stash[conftest.CPU_BEFORE] = cpu_time.counted_s() - spent_s * cpu_time.slowness()
    call: Any = SimpleNamespace(when="teardown")
    report: Any = SimpleNamespace(passed=True, outcome="passed")
    hook: Iterator[Any] = conftest.pytest_runtest_makereport(item, call)
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)  # type: ignore[attr-defined]
    return str(report.outcome)


def test_a_test_of_the_gate_that_takes_long_fails() -> None:
    assert outcome(LONGEST_S + 0.5) == "failed"
    assert outcome(LONGEST_S - 1.0) == "passed"
    assert outcome(LONGEST_S + 0.5, pytest.mark.slow) == "passed"
    assert outcome(LONGEST_S + 0.5, pytest.mark.sole("a protocol")) == "passed"


def test_cpu_time_of_others_and_shared_starts_are_not_counted() -> None:
    before_s = cpu_time.counted_s()
    time.sleep(0.05)
    with cpu_time.shared():
        while cpu_time._spent_s() - before_s < 0.1:
            pass
    assert cpu_time.counted_s() - before_s < 0.09


def test_each_word_has_an_order_in_which_files_stay_together() -> None:
    def order(word: str | None) -> list[tuple[str, str]]:
        files = [conftest.LAST, *(conftest.FOLDER / "server" / f"test_{number}.py" for number in range(9))]
        items: Any = [Case(name) for _ in files for name in "xy"]
        for item, path in zip(items, [file for file in files for _ in "xy"], strict=True):
            item.path = path
        config: Any = SimpleNamespace(getoption={"--order": word}.get)
        conftest.pytest_collection_modifyitems(config, items)
        return [(item.path.name, item.nodeid) for item in items]

    orders = [order(word) for word in (None, "one", "two")]
    assert orders[0][-1] == (conftest.LAST.name, "y")
    assert orders[1] == order("one") != orders[2]
    for tests in orders:
        assert sorted(tests) == sorted(orders[0])
        assert [name for _, name in tests] == ["x", "y"] * 10
        assert all(first[0] == second[0] for first, second in zip(tests[::2], tests[1::2], strict=True))


@pytest.mark.parametrize(("begun_s", "skips"), [(1.0, False), (-1.0, True)])
def test_no_test_begins_late(begun_s: float, skips: bool) -> None:
    stash = pytest.Stash()
    stash[conftest.LAST_BEGIN] = time.monotonic() + begun_s
    item: Any = SimpleNamespace(config=SimpleNamespace(stash=stash, getoption=lambda _: 7.0))
    if not skips:
        conftest.pytest_runtest_setup(item)
        return
    with pytest.raises(pytest.skip.Exception, match="not begun within 7 minutes"):
        conftest.pytest_runtest_setup(item)


def test_the_page_lists_the_sole_tests() -> None:
    assert sole_tests() in README.read_text(), f"the table should be:\n{sole_tests()}"
