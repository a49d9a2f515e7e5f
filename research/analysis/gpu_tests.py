"""Tests of a session on a device (`gpu_session.py`).

A pytest process for each file, several at once.

One test may take the whole process with it (a CUDA context does not survive an illegal access), so
that no file depends on another. Results are written after every file: which tests failed, and which
ones were running when time was up.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from research.analysis.gpu_results import SectionResults

FILES = (
    "cuda/test_recorded_steps",
    "cuda/test_recorded_heads",
    "cuda/test_attention_kernel",
    "cuda/test_recurrence_kernels",
    "cuda/test_recording",
    "cuda/test_layer_kernels",
    "kernels/test_block_kernels",
    "cuda/test_row_kernels",
    "cuda/test_nucleus_kernels",
    "cuda/test_move_kernel",
    "cuda/test_parts",
)
"""Files that say most of the kernels and graphs; those that take longest come first."""
_AT_ONCE = 8
_ROOT = Path(__file__).parents[2]


def run_file(name: str, limit_s: float, root: Path = _ROOT) -> dict[str, Any]:
    """Run a file's tests to their end or their time limit. root: the checkout."""
    options = ["-v", "--color=no", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{name}.py"]
    began = time.monotonic()
    # A file and no pipe: processes that a stopped test has started would keep a pipe open.
    with tempfile.TemporaryFile() as file:
        try:
            done = subprocess.run(command, cwd=root, stdout=file, stderr=file, timeout=limit_s, check=False)
            ended = f"ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit_s:.0f} s"
        file.seek(0)
        output = file.read().decode(errors="replace")
    print(f"== {name}: {ended}\n{output}", file=sys.stderr, flush=True)
    lines = output.strip().splitlines() or [""]
    seconds = round(time.monotonic() - began, 1)
    return {"ended": ended, "seconds": seconds, "last_line": lines[-1], **outcomes(output)}


def outcomes(output: str) -> dict[str, Any]:
    """Return the number of passed tests, the failed ones, and the one without a result.

    output: of `-v`.
    """
    found = re.findall(r"^(\S+::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*)? *$", output, re.MULTILINE)
    failed = {name for name, outcome in found if outcome in ("FAILED", "ERROR")}
    running = {name for name, outcome in found if not outcome} - {name for name, outcome in found if outcome}
    return {
        "passed": sum(outcome == "PASSED" for _, outcome in found),
        "failed": sorted(failed),
        "running": sorted(running),
    }


def run_files(files: Sequence[str], findings: SectionResults, limit_s: float, root: Path = _ROOT) -> None:
    """Run the tests of files of a checkout.

    A test that fails, and a file without passed tests, are failures.
    """
    deadline = time.monotonic() + limit_s
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        started = {
            pool.submit(lambda name: run_file(name, max(1.0, deadline - time.monotonic()), root), name): name
            for name in files
        }
        for one in as_completed(started):
            name, result = started[one], one.result()
            found[name] = result
            findings.add("files", found, is_shown=False)
            findings.show(f"{name}: {result['passed']} passed, {result['seconds']:g} s")
            which = [*result["failed"], *(f"{test} (running)" for test in result["running"])]
            is_well = result["ended"] == "ended with 0" and result["passed"]
            findings.require(is_well, f"{name} {result['ended']}: {', '.join(which) or result['last_line']}")


def main(arguments: Sequence[str]) -> int:
    """Run files; the arguments: the JSON document to write, the time limit in seconds."""
    run_files(FILES, SectionResults(Path(arguments[0])), float(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
