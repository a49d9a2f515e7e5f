"""Environment of a measurement, for every stored result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Return commit, processor and libraries."""
    return {
        "commit": commit_of(Path.cwd()),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in ("torch", "transformers", "polydraft", "numba", "triton")},
        **_device(),
    }


def _device() -> dict[str, Any]:
    """Return the GPU, if this process has used one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def commit_of(folder: Path) -> str | None:
    """Return the commit of a checkout; None outside a repository or without git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return described.stdout.strip() or None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # run from its folder
        return None
