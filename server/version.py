"""The installed version, and the commit of its source."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    VERSION = version("polydraft")
except PackageNotFoundError:  # run from a checkout that is not installed
    VERSION = "0+unknown"

_BUILT_FROM = Path(__file__).with_name("commit.txt")
COMMIT = _BUILT_FROM.read_text().strip() if _BUILT_FROM.exists() else None
"""Commit that the build of an image was told; None elsewhere."""
