"""Tests of a session on a device (`gpu_session.py`): a pytest process for each file, several at once.

One test may take the whole process with it (a CUDA context does not survive an illegal access), so that no file depends
on another. Results are written after every file: which tests failed, and which ones were running when time was up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

FILES = (
    "engine/test_recorded_steps",
    "engine/test_recording",
    "attention/test_paged_attention",
    "models/test_triton_layer",
    "kernels/test_triton_rows",
    "kernels/test_block_kernels",
    "engine/test_host_reads",
    "kernels/test_triton_nucleus",
    "kernels/test_choosing",
    "speculation/test_longest_match",
    "kernels/test_triton_keep",
)
"""Those that take longest come first."""
_AT_ONCE = 8
_ROOT = Path(__file__).parents[1]


def run_file(name: str, limit_s: float, root: Path = _ROOT) -> dict[str, Any]:
    """Run a file's tests to their end or their time limit. root: the checkout."""
    options = ["-v", "--color=no", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{name}.py"]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace"
        )
        ended, output = f"ended with {done.returncode}", done.stdout + done.stderr
    except subprocess.TimeoutExpired as stopped:
        ended, output = f"stopped after {limit_s:.0f} s", (stopped.stdout or b"").decode(errors="replace")
    print(f"== {name}: {ended}\n{output}", flush=True)
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1), **outcomes(output)}


def outcomes(output: str) -> dict[str, Any]:
    """Return the number of passed tests, the failed ones, and the one without a result, from the output of `-v`."""
    told = re.findall(r"^(\S+::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*)? *$", output, re.MULTILINE)
    failed = {name for name, outcome in told if outcome in ("FAILED", "ERROR")}
    running = {name for name, outcome in told if not outcome} - {name for name, outcome in told if outcome}
    return {
        "passed": sum(outcome == "PASSED" for _, outcome in told),
        "failed": sorted(failed),
        "running": sorted(running),
    }


def run_files(names: Sequence[str], document: Path, limit_s: float, root: Path = _ROOT) -> None:
    """Run the tests of files of a checkout, and write the results as JSON after each file."""
    deadline = time.monotonic() + limit_s
    found: dict[str, Any] = {"failures": [], "files": {}}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        started = {
            pool.submit(lambda name: run_file(name, max(1.0, deadline - time.monotonic()), root), name): name
            for name in names
        }
        for one in as_completed(started):
            name, result = started[one], one.result()
            found["files"][name] = result
            if result["ended"] != "ended with 0":
                which = [*result["failed"], *(f"{test} (running)" for test in result["running"])]
                found["failures"].append(f"{name} {result['ended']}: {', '.join(which) or 'no test is to blame'}")
            document.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Run all files; the arguments are the JSON document to write and the time limit in seconds."""
    run_files(FILES, Path(arguments[0]), float(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
