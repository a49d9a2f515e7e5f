"""Measurements of one start that the next start on the same machine uses: JSON files in a folder.

Not for: measuring, or checking whether a measurement still holds (`calibration.py`, `models/packing.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any


def profile_file(folder: str, described: Any, progress: Callable[[str], None]) -> Path | None:
    """Return the file for measurements of what is described, made on this machine; None if there is no place for it, or
    the folder is `off`.
    """
    if folder == "off":
        return None
    machine = [_processor(), os.cpu_count()]  # without its name: a container has another one at every start
    digest = hashlib.sha256(json.dumps([described, machine], sort_keys=True, default=str).encode()).hexdigest()
    try:
        return Path(folder).expanduser() / f"{digest[:24]}.json"
    except RuntimeError as error:  # a user without a home folder
        progress(f"measurements cannot be stored ({error}); name a folder with --profile-cache")
        return None


def _processor() -> str:
    """Return the processor's model, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def read_profile(file: Path) -> Any:
    """Return the content of a file, unchecked; None if there is nothing that can be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def write_profile(file: Path | None, measured: Any, progress: Callable[[str], None]) -> None:
    """Store measurements. If the folder cannot be written, report that the next start measures again."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(measured))
        partial.replace(file)
    except OSError as error:
        progress(
            f"measurements cannot be stored in {file.parent} ({error.strerror}), and the next start measures again; "
            "name another folder with --profile-cache, or off"
        )
