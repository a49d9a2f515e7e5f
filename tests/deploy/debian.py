"""Programs and files of Debian's packages for tests, without installing them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polydraft" / "debian"


def unpacked(package: str) -> Path:
    """A folder with what a package holds; skips the test where it cannot be fetched."""
    folder = _CACHE / package
    if folder.exists():
        return folder
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip(f"this is no Debian to take the package {package} from")
    making = folder.with_name(f"{package}.{os.getpid()}")
    making.mkdir(parents=True)
    # Lists of packages may be missing on a new machine; an update needs root.
    fetch = f"apt-get download {package} || (apt-get update && apt-get download {package})"
    command = f"({fetch}) && dpkg -x {package}_*.deb . && rm {package}_*.deb"
    run = subprocess.run(command, shell=True, cwd=making, capture_output=True, text=True, check=False)
    if run.returncode:
        shutil.rmtree(making)
        pytest.skip(f"Debian's package {package} cannot be fetched: {run.stderr[-200:]}")
    if not folder.exists():
        making.rename(folder)
    return folder
