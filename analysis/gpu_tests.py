"""Tests of a session on a device (`gpu_session.py`): a pytest process for each file, several at once.

One test may take the whole process with it (a CUDA context does not survive an illegal access), so that no file depends
on another. Results are written after every file: which tests failed, and which ones were running when time was up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FIRST = (
    "engine/test_recorded_steps",
    "heads/test_recorded",
    "attention/test_paged_attention",
    "engine/test_recording",
    "models/test_triton_layer",
    "kernels/test_block_kernels",
    "kernels/test_triton_rows",
    "attention/test_parts",
)
"""Files that say most of the kernels and graphs; those that take longest come first."""
OTHERS = (
    "engine/test_host_reads",
    "kernels/test_triton_nucleus",
    "kernels/test_choosing",
    "speculation/test_longest_match",
    "kernels/test_triton_keep",
    "engine/test_draft_window",
    *(("models/test_products",) if find_spec("torchao") else ()),  # all of its weights are quantised
)
_AT_ONCE = 8
_ROOT = Path(__file__).parents[1]


def run_file(name: str, marks: str, limit_s: float, root: Path = _ROOT) -> dict[str, Any]:
    """Run a file's tests to their end or their time limit. marks: as of pytest's `-m`; root: the checkout."""
    options = ["-v", "--color=no", "-p", "no:cacheprovider", "-m", marks]
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
    print(f"== {name}: {ended}\n{output}", flush=True)
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1), **outcomes(output)}


def outcomes(output: str) -> dict[str, Any]:
    """Return the number of passed tests, the failed ones, and the one without a result, from the output of `-v`."""
    found = re.findall(r"^(\S+::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*)? *$", output, re.MULTILINE)
    failed = {name for name, outcome in found if outcome in ("FAILED", "ERROR")}
    running = {name for name, outcome in found if not outcome} - {name for name, outcome in found if outcome}
    return {
        "passed": sum(outcome == "PASSED" for _, outcome in found),
        "failed": sorted(failed),
        "running": sorted(running),
    }


def run_files(files: Sequence[tuple[str, str]], document: Path, limit_s: float, root: Path = _ROOT) -> None:
    """Run the tests of files of a checkout, and write the results as JSON after each file. files: (name, marks)."""
    deadline = time.monotonic() + limit_s
    found: dict[str, Any] = {"failures": [], "files": {}}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        started = {
            pool.submit(lambda one: run_file(*one, max(1.0, deadline - time.monotonic()), root), one): one
            for one in files
        }
        for one in as_completed(started):
            (name, marks), result = started[one], one.result()
            found["files"][name] = result
            has_none = marks == "slow" and result["ended"] == "ended with 5"
            if not has_none and (result["ended"] != "ended with 0" or not result["passed"]):
                which = [*result["failed"], *(f"{test} (running)" for test in result["running"])]
                found["failures"].append(f"{name} {result['ended']}: {', '.join(which) or 'no test is to blame'}")
            document.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Run files; the arguments: `tests` or `other-tests`, the JSON document to write, the time limit in seconds."""
    first = [(name, "not slow") for name in FIRST]
    others = [*((name, "slow") for name in FIRST), *((name, "slow or not slow") for name in OTHERS)]
    run_files(first if arguments[0] == "tests" else others, Path(arguments[1]), float(arguments[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
