"""What measurements depend on, for every result that is written down."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Commit, processor, libraries."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in ("torch", "transformers", "polydraft")},
    }


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
