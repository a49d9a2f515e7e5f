"""Imports of a session on a device (`gpu_session.py`): every module of the engine, and every one that is missing.

Not for: imports of the server, which a session does not use.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("engine", "analysis", "demo")


def names_in(packages: Iterable[str]) -> list[str]:
    """Return the names of all modules of packages, without their programs."""
    found = []
    for package in packages:
        paths = importlib.import_module(package).__path__
        found += [one.name for one in pkgutil.walk_packages(paths, f"{package}.") if not one.name.endswith("__main__")]
    return found


def imported(names: Iterable[str]) -> dict[str, Any]:
    """Import modules; return those that failed, and the modules of others that are missing, with what needs them."""
    failures: list[str] = []
    missing: dict[str, list[str]] = {}
    count = 0
    for name in names:
        try:
            importlib.import_module(name)
            count += 1
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in _PACKAGES:
                failures.append(f"{name}: {error}")
            else:
                missing.setdefault(package, []).append(name)
        except Exception as error:  # of any module
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return {"failures": failures, "imported": count, "missing": missing}


def device() -> dict[str, Any] | None:
    """Return the name, the multiprocessors and the bytes of the device; None without one."""
    import torch  # its absence is found before

    if not torch.cuda.is_available():
        return None
    about = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {"name": about.name, "processors": about.multi_processor_count, "free_bytes": free, "bytes": total}


def main(arguments: Sequence[str]) -> int:
    """Import all modules; the first argument is the JSON document to write."""
    began = time.monotonic()
    found = imported(names_in(_PACKAGES))
    print(json.dumps(found := {**found, "device": device(), "seconds": round(time.monotonic() - began, 1)}))
    Path(arguments[0]).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
