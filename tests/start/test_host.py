"""Number of cores of the engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.start import host


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [(8, "max 100000", 8), (8, "400000 100000", 4), (2, "400000 100000", 2), (8, "50000 100000", 1), (8, None, 8)],
)
def test_cores_are_those_that_the_process_may_use(
    affinity: int, quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has many more."""
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(f"{quota}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert host.usable_cores(file) == cores


@pytest.mark.parametrize(
    ("wanted", "variable", "most"), [(0, None, 4), (0, "2", 2), (0, "64", 4), (0, "0", 1), (0, "auto", 4), (3, "2", 3)]
)
def test_passes_take_the_cores_that_are_left_to_them(
    wanted: int, variable: str | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An explicit number counts before OMP_NUM_THREADS."""
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert host.most_cores(ModelConfig(target="t", num_threads=wanted)) == most
