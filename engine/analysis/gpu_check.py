"""`make gpu-check`: what must hold on a CUDA device, and how fast it is there, in one command of under ten minutes.

Runs the tests that exercise the device, the exactness gate, and the bench beside transformers on a pair of known law;
writes one JSON document, also where a part fails or runs out of its time. Uses the Python it is started with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.environment import environment

_KERNELS = (
    "execution/test_paged_attention",
    "execution/test_graphs",
    "sampling/test_triton_rows",
    "cache/test_triton_keep",
)


@dataclass(frozen=True)
class Part:
    """One command, and how long it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


@dataclass
class Outcome:
    """How a part ended."""

    passed: bool
    seconds: float
    last_line: str


def parts_of(pair: Path, result: Path, size: str) -> list[Part]:
    """Tests first, then the gate, then the bench."""
    tests = "tests/execution"
    test = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    bench = ("--device", "cuda", "--dtype", "bfloat16", "--concurrency", "1,4,16,64", "--repeats", "3")
    return [
        Part("kernels", (*test, *(f"tests/{name}.py" for name in _KERNELS)), 150),
        Part("architectures", (*test, f"{tests}/test_architectures.py"), 120),
        Part("exactness", (*test, "tests/engine/test_host_reads.py", "tests/engine/test_everything_on.py"), 120),
        Part("pair", ("-m", "engine.demo.bench_pair", str(pair), "--size", size), 60),
        Part(
            "bench",
            ("-m", "engine.analysis.peers", f"{pair}/target", f"{pair}/draft", *bench, "--output", str(result)),
            150,
        ),
    ]


def run(part: Part) -> Outcome:
    """Run a part to its end, or to the end of its time."""
    surroundings = {**os.environ, "POLYDRAFT_TEST_DEVICE": "cuda", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.arguments], env=surroundings, timeout=part.limit_s, capture_output=True, text=True
        )
        lines, passed = (done.stdout + done.stderr).strip().splitlines(), done.returncode == 0
    except subprocess.TimeoutExpired:
        lines, passed = [f"stopped after {part.limit_s:.0f} s"], False
    return Outcome(passed, time.monotonic() - began, lines[-1] if lines else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 when all passed, 1 when something failed, 2 without a device."""
    parser = argparse.ArgumentParser(prog="python -m engine.analysis.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1b", help="of the bench pair's target (engine.demo.bench_pair)")
    parser.add_argument("--output", type=Path, default=Path("docs/results/gpu-check.json"), help="the JSON document")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu-check: this machine has no CUDA device (or its torch cannot use one)", file=sys.stderr)
        return 2
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "environment": environment(), "parts": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Path(folder) / "bench.json"
        for part in parts_of(Path(folder), bench, options.size):
            print(f"{part.name} ...", flush=True)
            outcome = run(part)
            print(
                f"{part.name}: {'passed' if outcome.passed else 'FAILED'}, {outcome.seconds:.0f} s, {outcome.last_line}"
            )
            document["parts"][part.name] = asdict(outcome)
            if bench.exists():
                document["bench"] = json.loads(bench.read_text())
            options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(outcome["passed"] for outcome in document["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
