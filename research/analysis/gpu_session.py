"""`make gpu-check`: 23 minutes on a CUDA device, in three parts.

The first finds the most in at most ten minutes: an engine (does it run, is it exact, tokens per
second), every kernel, transformers' `generate`, tests. The others: speeds for the record, and
quantised weights (which need torchao).

Every section runs in a separate process with a time limit. Facts are printed and written as soon as
they are known, so a section that hangs, crashes or exceeds its limit leaves its results so far. A
fall-back (plain operations instead of kernels, steps that are not recorded) is a failure. Needs no
git, no network and no checkpoint: the models are created on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadtest.environment import environment

NEEDED = (
    *("gguf", "msgspec", "numpy", "safetensors", "scipy", "torch", "tqdm", "transformers", "triton", "yaml"),
    *("pytest", "pytest_timeout"),
)
"""Modules that a machine with a device must have; all other packages that Polydraft depends on are
not imported.
"""
_LONGEST_LINE = 200
_LAST_LINES = 15
"""Lines of output that are kept of a section that failed or was stopped."""
_STACK_S = 3
"""Seconds for a stopped section to write its stacks."""
_LEFT_S = 15
"""Time of the tests' limit in which they are stopped and their results are written."""


@dataclass(frozen=True)
class Section:
    """Section of a part."""

    name: str
    limit_s: float
    what: str


PARTS: dict[int, Sequence[Section]] = {
    1: (
        Section(
            "engine", 300, "exactness, start, fall-backs, steps, the distribution of its output, speeds, a profile"
        ),
        Section("kernels", 110, "times of every kernel at the shapes of Qwen3-8B and Qwen3-0.6B"),
        Section("generate", 60, "tokens a second of transformers' generate on the same pair"),
        Section("tests", 95, "tests of kernels and graphs"),
    ),
    2: (Section("record", 290, "tokens a second of every shape at 1, 4, 16 and 64 requests"),),
    3: (
        Section("weights", 525, "the checkpoint's weights, fp8 and int4: the probe, the distribution, times of steps"),
    ),
}


def run_section(section: Section, setting: dict[str, Any], folder: Path, log: Path) -> dict[str, Any]:
    """Run a section to its end or its time limit.

    Its errors are appended to the log, its results are returned.

    setting: values of the arguments of all sections (`gpu_results.add_setting`), by name.
    """
    found = folder / f"{section.name}.json"
    found.unlink(missing_ok=True)
    arguments = [word for name, value in setting.items() for word in (f"--{name}", str(value))]
    if section.name == "tests":
        command = ["-m", "research.analysis.gpu_tests", str(found), str(section.limit_s - _LEFT_S)]
    else:
        command = ["-m", "research.analysis.gpu_sections", section.name, str(found), *arguments]
    surroundings = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    if setting["device"] == "cuda":
        surroundings["POLYDRAFT_TEST_DEVICE"] = "cuda"
    elif section.name == "kernels":
        surroundings["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with log.open("ab") as output:
        output.write(f"== {section.name}\n".encode())
        output.flush()
        # The processes of a section end with it.
        process = subprocess.Popen(
            [sys.executable, *command],
            env=surroundings,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(section.limit_s)
            ended = "ended" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {section.limit_s:g} s"
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                # They write where they are (`gpu_results.write_stacks`)
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(_STACK_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result: dict[str, Any] = {"ended": ended, "seconds": round(time.monotonic() - began, 1)}
    if ended != "ended":
        lines = log.read_text(encoding="utf8", errors="replace").strip().splitlines()
        result["last_lines"] = [line[:_LONGEST_LINE] for line in lines[-_LAST_LINES:]]
    if found.exists():
        result["found"] = json.loads(found.read_text())
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return the exit code.

    0 if every section succeeded without a fall-back, 1 if not, 2 without the device or the modules.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"gpu-check: {sys.executable} has no {', '.join(missing)}; install them first", file=sys.stderr)
        return 2
    from research.analysis import gpu_results

    options = parser().parse_args(arguments)
    setting = {name: value for name, value in vars(options).items() if name not in ("part", "section", "output")}
    if options.device == "cuda" and not gpu_results.has_cuda():
        print("gpu-check: this machine has no CUDA device (or its torch cannot use one)", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    all_well = True
    for number in options.part or sorted(PARTS):
        log = options.output / f"gpu-part-{number}.log"
        log.unlink(missing_ok=True)
        seconds: dict[str, float] = {}
        document: dict[str, Any] = {
            "what": "a session on a device, by analysis.gpu_session",
            "part": number,
            "setting": setting,
            "environment": environment(),
            "sections": {},
        }
        for section in PARTS[number]:
            if options.section and section.name not in options.section:
                continue
            print(f"== part {number}, {section.name}: {section.what}", flush=True)
            result = run_section(section, setting, options.output, log)
            seconds[section.name] = result["seconds"]
            print(f"== {section.name} {result['ended']}, {result['seconds']} s", flush=True)
            for line in result.get("last_lines", ()):
                print(f"  | {line}")
            all_well &= result["ended"] == "ended" and not result.get("found", {}).get("failures")
            document["sections"][section.name] = result
            (options.output / f"gpu-part-{number}.json").write_text(json.dumps(document, indent=1) + "\n")
            (options.output / f"{section.name}.json").unlink(missing_ok=True)
        for name, result in document["sections"].items():
            for failure in result.get("found", {}).get("failures", []):
                print(f"FAILED {name}: {failure[:_LONGEST_LINE]}")
        print(f"part {number}: {json.dumps(seconds)}", flush=True)
    return 0 if all_well else 1


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    from research.analysis import gpu_results

    result = argparse.ArgumentParser(
        prog="python -m research.analysis.gpu_session", description=__doc__.split("\n\n")[0]
    )
    result.add_argument("--part", type=int, action="append", choices=sorted(PARTS), help="may be repeated; default all")
    names = [section.name for sections in PARTS.values() for section in sections]
    result.add_argument("--section", action="append", choices=names, help="run this alone; may be repeated")
    result.add_argument("--output", type=Path, default=Path("docs/results/gpu"), help="folder of results and logs")
    gpu_results.add_setting(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
