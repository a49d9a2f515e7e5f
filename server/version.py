"""The installed version, and the commit of its source."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    VERSION = version("polydraft")
except PackageNotFoundError:  # run from a checkout that is not installed
    VERSION = "0+unknown"

_BUILT_FROM = Path(__file__).with_name("commit.txt")
"""File that the build of an image writes."""


@cache
def source_commit() -> str | None:
    """Return the commit that an image was built from, or of a checkout; None if it is unknown."""
    if _BUILT_FROM.exists():
        return _BUILT_FROM.read_text().strip() or None
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
