"""`make gpu-check`: 40 minutes on a CUDA device, in four parts: correctness and a profile, the benefit of each fast
path, the figures for the record, and quantised weights (which need torchao).

Every section runs in a separate process with a time limit. Results are written after every item, so a section that
hangs, crashes or exceeds its limit leaves its results so far. A fall-back (plain operations instead of kernels, steps
that are not recorded) is a failure. Needs no git, no network and no checkpoint: the pair is created on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loadtest.environment import environment

NEEDED = ("msgspec", "numpy", "safetensors", "scipy", "torch", "tqdm", "transformers", "triton", "pytest")
"""Modules that a machine with a device must have; the others that Polydraft depends on are not imported."""
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
        Section("tests", 270, "the tests of kernels and graphs"),
        Section("trace", 260, "ceilings, the fast paths in use, times of passes, and what a step consists of"),
    ),
    2: (
        Section("variants", 370, "kernels, graphs and shapes against the same without them, in turns"),
        Section("law", 160, "the distribution of the output, drawn by the build that is measured"),
    ),
    3: (Section("record", 530, "tokens a second of every shape and of plain decoding, at 1, 4, 16 and 64 requests"),),
    4: (
        Section("weights", 530, "the checkpoint's weights, fp8 and int4: the probe, the distribution, times of steps"),
    ),
}


@dataclass(frozen=True)
class Setting:
    """Settings of all sections."""

    device: str
    target: str
    draft: str
    vocabulary: int
    scale: float
    """Factor of all durations: small for a dry run."""

    def arguments(self) -> list[str]:
        """Return the arguments of a section's process."""
        return [
            *("--device", self.device, "--target", self.target, "--draft", self.draft),
            *("--vocabulary", str(self.vocabulary), "--scale", str(self.scale)),
        ]


def run_section(section: Section, setting: Setting, folder: Path) -> dict[str, Any]:
    """Run a section to its end or its time limit; its log and its results stay in the folder."""
    found = folder / f"{section.name}.json"
    found.unlink(missing_ok=True)
    if section.name == "tests":
        command = ["-m", "analysis.gpu_tests", str(found), str(section.limit_s - _LEFT_S)]
    else:
        command = ["-m", "analysis.gpu_sections", section.name, str(found), *setting.arguments()]
    surroundings = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if setting.device == "cuda":
        surroundings["POLYDRAFT_TEST_DEVICE"] = "cuda"
    began = time.monotonic()
    log = folder / f"{section.name}.log"
    with log.open("w", encoding="utf8") as output:
        try:
            done = subprocess.run(
                [sys.executable, *command],
                env=surroundings,
                timeout=section.limit_s,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            ended = "ended" if done.returncode == 0 else f"failed with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {section.limit_s:g} s"
    lines = log.read_text(encoding="utf8", errors="replace").strip().splitlines()
    result = {"ended": ended, "seconds": round(time.monotonic() - began, 1), "last_line": lines[-1] if lines else ""}
    if found.exists():
        result["found"] = json.loads(found.read_text())
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 0 if every section succeeded without a fall-back, 1 if not, 2 without the device or the
    modules.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"gpu-check: {sys.executable} has no {', '.join(missing)}; install them first", file=sys.stderr)
        return 2
    from analysis import gpu_sections

    options = parser().parse_args(arguments)
    setting = Setting(options.device, options.target, options.draft, options.vocabulary, options.scale)
    if setting.device == "cuda" and not gpu_sections.has_cuda():
        print("gpu-check: this machine has no CUDA device (or its torch cannot use one)", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    all_well = True
    for number in options.part or sorted(PARTS):
        document: dict[str, Any] = {
            "what": "a session on a device, by analysis.gpu_session",
            "part": number,
            "setting": vars(setting),
            "environment": environment(),
            "sections": {},
        }
        for section in PARTS[number]:
            print(f"part {number}, {section.name}: {section.what} ...", flush=True)
            result = run_section(section, setting, options.output)
            failures = result.get("found", {}).get("failures", [])
            all_well &= result["ended"] == "ended" and not failures
            said = "; ".join(failures) or result["last_line"]
            print(f"  {result['ended']}, {result['seconds']} s; {said}", flush=True)
            document["sections"][section.name] = result
            (options.output / f"gpu-part-{number}.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all_well else 1


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    from analysis import gpu_sections

    result = argparse.ArgumentParser(prog="python -m analysis.gpu_session", description=__doc__.split("\n\n")[0])
    result.add_argument("--part", type=int, action="append", choices=sorted(PARTS), help="may be repeated; default all")
    result.add_argument("--output", type=Path, default=Path("docs/results/gpu"), help="folder of results and logs")
    gpu_sections.add_setting(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
