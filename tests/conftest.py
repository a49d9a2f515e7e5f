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


def pytest_collection_finish() -> None:
    """Everything imported by now stays: Python need not look through it for garbage again and again."""
    gc.freeze()
    gc.enable()
