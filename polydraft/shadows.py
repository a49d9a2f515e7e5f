"""Checks that imports find the project's packages, and none of the same name elsewhere.

Nothing is imported: a search of the path for each name takes a millisecond together.
"""

from __future__ import annotations

import csv
import os
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("engine", "server", "loadtest", "deploy")
_ADVICE = (
    "install Polydraft in its own environment (uv tool install polydraft, or pipx install polydraft), "
    "and start it without that folder on PYTHONPATH"
)


def shadow(root: Path | None = None) -> str | None:
    """Return one line about the first hidden or replaced package, or None.

    root: folder of the project's packages.
    """
    folder = root or Path(__file__).parents[1]
    sizes = _installed_sizes(folder)
    for name in PACKAGES:
        expected = folder / name / "__init__.py"
        spec = find_spec(name)
        if spec is None:
            return f"package {name} is missing from {folder}; install Polydraft again"
        imported = _place(spec)
        if not _are_same(imported, expected):
            return f"{imported} hides Polydraft's package {name} ({expected.parent}): {_ADVICE}"
        if expected.stat().st_size != sizes.get(name, expected.stat().st_size):
            return f"{expected} belongs to another package, which replaced Polydraft's package {name}: {_ADVICE}"
    return None


def _place(spec: ModuleSpec) -> str:
    """Return the file that an import would read, or a folder of a namespace package."""
    if spec.origin is not None:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), spec.name)


def _are_same(imported: str, expected: Path) -> bool:
    if imported == str(expected):
        return True
    return os.path.exists(imported) and expected.exists() and os.path.samefile(imported, expected)


def _installed_sizes(folder: Path) -> dict[str, int]:
    """Return each installed package's size of `__init__.py`; empty for a checkout."""
    record = next(folder.glob("polydraft-*.dist-info/RECORD"), None)
    if record is None:
        return {}
    with record.open(newline="") as lines:
        sizes = {path: size for path, _, size in csv.reader(lines)}
    files = {name: sizes.get(f"{name}/__init__.py") for name in PACKAGES}
    return {name: int(size) for name, size in files.items() if size}
