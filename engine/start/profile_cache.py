"""Cache of measurements: one JSON file for each engine and machine, whose name is a digest of both.

Not for: the content of the files (`calibration.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

from engine.start.loading import Progress


def profile_file(folder: str, described: Any, progress: Progress) -> Path | None:
    """Return the file for measurements of a described engine on this machine.

    None if the folder is `off`, or if there is no place for it, which is reported.
    """
    if folder == "off":
        return None
    # Without its name, which differs at every start of a container.
    machine = [_processor(), os.cpu_count()]
    key = json.dumps([described, machine], sort_keys=True, default=str)
    digest = hashlib.sha256(key.encode()).hexdigest()
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
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def read_profile(file: Path) -> Any:
    """Return the unchecked content of a file; None if the file cannot be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def write_profile(file: Path | None, measured: Any, progress: Progress) -> None:
    """Store measurements. If the folder cannot be written, report that the next start measures
    again.
    """
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(measured))
        partial.replace(file)
    except OSError as error:
        progress(
            f"measurements cannot be stored in {file.parent} ({error.strerror}), and the next "
            "start measures again; name another folder with --profile-cache, or off"
        )
