"""Small random models for all tests, built in memory; nothing is downloaded."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LAST_BEGIN = pytest.StashKey[float]()

gc.disable()  # until the tests are collected
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("POLYDRAFT_TEST_DEVICE", "cpu") == "cpu":
    # Read at the first import of Triton, whichever module makes it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import Phase, settings
except ModuleNotFoundError:  # `make gpu-check` runs the tests of kernels by a Python that may have pytest alone
    pass
else:
    # The same examples in every run. A mutant need not be made simple: that it fails is enough.
    _phases = [phase for phase in Phase if phase != Phase.shrink or "MUTANT_UNDER_TEST" not in os.environ]
    settings.register_profile("polydraft", derandomize=True, database=None, deadline=None, phases=_phases)
    settings.load_profile("polydraft")


@pytest.fixture
def attention_in_torch() -> Iterator[None]:
    """Passes over pages attend in torch, and not by the kernel in its interpreter."""
    from tests.cuda.in_torch import attention_in_torch

    with attention_in_torch():
        yield


# The files that take longest, in this order before all others: no long file is left for one core at
# the end.
LONG = (
    "deploy/test_image",
    "deploy/test_ray",
    "deploy/test_wheel",
    "cpu/test_processors",
    "server/clients/test_lm_eval",
    "analysis/test_gpu_session",
    "analysis/test_gpu_kernels",
    "analysis/test_arms",
    "analysis/test_papers",
    "server/daemon/test_faults",
    "cuda/test_attention_kernel",
    "cpu/test_decoder",
    "cpu/test_compiling",
    "engine/test_output_distribution",
    "cuda/test_dry_run",
    "heads/test_one_pass",
    "server/openai/test_tools",
    "speculation/test_served_rules",
    "server/http/test_connections",
    "server/daemon/test_sleep",
    "server/openai/test_grammar_bombs",
    "cuda/test_layer_kernels",
    "engine/test_places",
    "speculation/test_below_text_drafts",
    "heads/test_eagle",
    "speculation/test_chain_rules",
    "speculation/test_served_mutants",
    "server/openai/test_trees_and_bias",
    "test_readme",
    "cuda/test_row_kernels",
    "server/daemon/test_hub_names",
    "control/test_controller",
)
# This file ends daemons that other files share, so they would have to start new ones after it.
LAST = "server/daemon/test_stopping"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a run that must end in time."""
    group = parser.getgroup("polydraft")
    group.addoption("--minutes", type=float, help="skip the tests that would begin later")
    group.addoption("--order", metavar="WORD", help="shuffle the files by this word, instead of long ones first")


def pytest_configure(config: pytest.Config) -> None:
    """Note when this process may begin its last test."""
    minutes = config.getoption("--minutes")
    if minutes is not None:
        config.stash[LAST_BEGIN] = time.monotonic() + 60 * minutes


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort files by how long they take, or shuffle them; tests of a file keep their order."""
    word = config.getoption("--order")
    place = {f"{name}.py": number for number, name in enumerate(LONG)}
    place[f"{LAST}.py"] = len(LONG) + 1

    def key(item: pytest.Item) -> int | str:
        file = str(item.path.relative_to(FOLDER))
        if word is None:
            return place.get(file, len(LONG))
        return hashlib.sha256(f"{word} {file}".encode()).hexdigest()

    items.sort(key=key)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which no time is left."""
    if time.monotonic() > item.config.stash.get(LAST_BEGIN, float("inf")):
        pytest.skip(f"not begun within {item.config.getoption('--minutes'):g} minutes")


def pytest_collection_finish() -> None:
    """Everything imported by now stays: Python need not look through it for garbage again and
    again.
    """
    gc.freeze()
    gc.enable()


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
