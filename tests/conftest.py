"""Small random models for all tests, built in memory; nothing is downloaded."""

from __future__ import annotations

import gc
import os

gc.disable()  # until the tests are collected
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if os.environ.get("POLYDRAFT_TEST_DEVICE", "cpu") == "cpu":
    # Read when Triton is first imported, by whomever.
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


def pytest_collection_finish() -> None:
    """Everything imported by now stays: Python need not look through it for garbage again and again."""
    gc.freeze()
    gc.enable()
