"""Small random models for all tests, built in memory; nothing is downloaded."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import cpu_time
from tests.grid import SEED, grid_seed, mark_slow

FOLDER = Path(__file__).parent
LAST_BEGIN = pytest.StashKey[float]()
CPU_BEFORE = pytest.StashKey[float]()

gc.disable()  # until the tests are collected
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("POLYDRAFT_TEST_DEVICE", "cpu") == "cpu":
    # Read at the first import of Triton, whichever module makes it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import settings
except ModuleNotFoundError:  # `make gpu-check` runs the tests of kernels by a Python that may have pytest alone
    pass
else:
    # The same examples in every run.
    settings.register_profile("polydraft", derandomize=True, database=None, deadline=None)
    settings.load_profile("polydraft")


@pytest.fixture
def attention_in_torch() -> Iterator[None]:
    """Passes over pages attend in torch, and not by the kernel in its interpreter."""
    from tests.cuda.in_torch import attention_in_torch

    with attention_in_torch():
        yield


# This file ends daemons that other files share, so they would have to start new ones after it.
LAST = FOLDER / "server" / "daemon" / "test_stopping.py"
BEFORE_DAEMONS, AFTER_DAEMONS = {"settings", "wire"}, {"text"}
"""Rooms of the server with few tests of daemons."""


# Files of tests that are all slow, by the package that they import and `make test-all` installs.
PACKAGES = {
    "deploy/test_kubernetes.py": "kubernetes_validate",
    "deploy/test_ray.py": "ray",
    "server/routes/test_live_page.py": "playwright",
    "server/routes/test_page_turns.py": "playwright",
    "server/routes/test_page_windows.py": "playwright",
}
collect_ignore = [file for file, package in PACKAGES.items() if find_spec(package) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a run that must end in time."""
    group = parser.getgroup("polydraft")
    group.addoption("--minutes", type=float, help="skip the tests that would begin later")
    group.addoption("--order", metavar="WORD", help="shuffle the files by this word")
    group.addoption("--cpu-limit", type=float, help="CPU seconds after which a test fails, unless it is slow or sole")


def pytest_configure(config: pytest.Config) -> None:
    """Note when this process may begin its last test."""
    minutes = config.getoption("--minutes")
    if minutes is not None:
        config.stash[LAST_BEGIN] = time.monotonic() + 60 * minutes


def pytest_report_header() -> str:
    """Name the seed of the cases, with which another run has the same."""
    return f"cases of sampled tests: {SEED}={grid_seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of grids that the gate leaves out, and sort the files."""
    mark_slow(items, grid_seed())
    word = config.getoption("--order")
    if word is None:
        items.sort(key=_place)
        return
    items.sort(key=lambda item: hashlib.sha256(f"{word} {item.path.relative_to(FOLDER)}".encode()).hexdigest())


def _place(item: pytest.Item) -> tuple[int, ...]:
    """Return a place in the order of all tests.

    Tests of daemons are in the middle, where one worker has them all: a worker that is done takes
    tests from the end of another's.
    """
    rooms = item.path.relative_to(FOLDER).parts
    if rooms[0] != "server":
        return (0,)
    return (1, (rooms[1] in AFTER_DAEMONS) - (rooms[1] in BEFORE_DAEMONS), item.path == LAST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which no time is left."""
    if time.monotonic() > item.config.stash.get(LAST_BEGIN, float("inf")):
        pytest.skip(f"not begun within {item.config.getoption('--minutes'):g} minutes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the CPU time before a test."""
    item.stash[CPU_BEFORE] = cpu_time.counted_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Fail a test of the gate that takes long and is not the only one of its capability."""
    report = yield
    most_s = item.config.getoption("--cpu-limit")
    may_take_long = any(map(item.get_closest_marker, ("slow", "sole")))
    if most_s is not None and call.when == "teardown" and report.passed and not may_take_long:
        spent_s = (cpu_time.counted_s() - item.stash[CPU_BEFORE]) / cpu_time.slowness()
        if spent_s > most_s:
            report.outcome = "failed"
            report.longrepr = f"{spent_s:.1f} s of CPU time, more than {most_s} s: see tests/README.md"
    return report


def pytest_collection_finish() -> None:
    """Exempt everything imported by now from garbage collection."""
    gc.freeze()
    gc.enable()
    if "numba" in sys.modules:
        cpu_time.leave_out_compiling()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds of each room of tests, if the slowest tests are printed, too."""
    if not config.getoption("durations"):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.nodeid.partition("::")[0]).parent.as_posix()] += report.duration
    terminalreporter.section(f"{seconds.total():.0f} seconds by room")
    for room, duration in seconds.most_common():
        terminalreporter.write_line(f"{duration:7.1f} s  {room}")
