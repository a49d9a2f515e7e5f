"""`python -m loadtest.start`: seconds until a daemon is ready, and the memory of its processes.

A daemon on the embedded pair starts with empty caches of kernels and measurements, then again with
those that it left. `--other FOLDER` alternates with the daemon of another checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.client import resident_mib
from loadtest.daemon import running_daemon
from loadtest.results import add_output_argument, document, write


def start(code: Path, caches: Path) -> dict[str, float]:
    """Start and end a daemon; caches: folder for kernels and measurements."""
    environment = [f"PYTHONPATH={code}", f"NUMBA_CACHE_DIR={caches}"]
    began = time.perf_counter()
    with running_daemon(["--profile-cache", str(caches)], ["env", "-C", str(code), *environment]) as url:
        return {"ready_s": round(time.perf_counter() - began, 2), **resident_mib(url)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.start", description=__doc__)
    parser.add_argument("--starts", type=int, default=4, help="starts of each daemon, the first with empty caches")
    parser.add_argument("--other", type=Path, help="checkout of another version, to alternate with")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    folders = {"this": Path(__file__).resolve().parents[1]}
    if options.other:
        folders["other"] = options.other.resolve()
    starts: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    with tempfile.TemporaryDirectory() as caches:
        for _ in tqdm(range(options.starts), unit="turn"):
            for name, folder in folders.items():
                starts[name].append(start(folder, Path(caches) / name))
    result = document("seconds until a daemon is ready, resident memory then", options, ["starts"], arms=starts)
    print(json.dumps(result, indent=1))
    write(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
