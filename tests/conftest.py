"""Small random models for all tests, built in memory; nothing is downloaded."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

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

# The files that take longest, in this order before all others: none of them is left for one core at the end.
LONG = (
    "deploy/test_image",
    "deploy/test_ray",
    "server/test_lm_eval",
    "analysis/test_gpu_session",
    "analysis/test_arms",
    "analysis/test_papers",
    "engine/test_recorded_steps",
    "engine/test_output_law",
    "server/test_faults",
    "attention/test_paged_attention",
    "models/test_triton_layer",
    "speculation/test_served_rules",
    "engine/test_places",
    "server/test_connections",
    "server/test_grammar_bombs",
    "server/test_hub_names",
    "server/test_stopping",
    "server/test_tools",
    "kernels/test_block_kernels",
    "engine/test_calibration",
    "engine/test_launches",
    "speculation/test_served_mutants",
    "control/test_controller",
    "server/test_limits",
    "test_readme",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files by how long they take; tests of a file keep their order."""
    place = {f"{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(str(item.path.relative_to(FOLDER)), len(LONG)))


def pytest_collection_finish() -> None:
    """Everything imported by now stays: Python need not look through it for garbage again and again."""
    gc.freeze()
    gc.enable()
