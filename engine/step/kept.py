"""Measurements of one start that the next start on the same machine uses: JSON files in a folder.

Not for: what is measured, or whether it still holds (`calibration.py`, `execution.packing`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOWHERE = "off"
"""In place of a folder: nothing is kept."""


def kept_file(folder: str, described: Any, progress: Callable[[str], None]) -> Path | None:
    """Where measurements of what is described, made on this machine, are kept; None where there is no such place."""
    if folder == NOWHERE:
        return None
    machine = [_processor(), os.cpu_count()]  # not its name: a container has another one every time
    digest = hashlib.sha256(json.dumps([described, machine], sort_keys=True, default=str).encode()).hexdigest()
    try:
        return Path(folder).expanduser() / f"{digest[:24]}.json"
    except RuntimeError as error:  # a user without a home
        progress(f"measurements cannot be kept ({error}); name a folder with --profile-cache")
        return None


def _processor() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def read_kept(file: Path | None) -> Any:
    """What is kept there, whatever it is; None where there is nothing that can be read."""
    try:
        return json.loads(file.read_text()) if file is not None else None
    except (OSError, ValueError, RecursionError):
        return None


def keep(file: Path | None, measured: Any, progress: Callable[[str], None]) -> None:
    """Keep measurements; a folder that cannot be written means measuring again next time, and a line that says so."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(measured))
        partial.replace(file)
    except OSError as error:
        progress(
            f"measurements cannot be kept in {file.parent} ({error.strerror}), so that the next start measures again; "
            "name another folder with --profile-cache, or off"
        )
