"""Common parts of the sections of a session on a device (`gpu_session.py`).

Results, options, times of work.

Times are those of the device, synchronised.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from research.demo import bench_pair

_LONGEST_ERROR, _LONGEST_LINE = 600, 300


class SectionResults:
    """Results of a section.

    They are written to disk after every item, and printed as soon as they are known.
    """

    def __init__(self, file: Path, continues: bool = False) -> None:
        """continues: whether the file has results of an earlier process, which stay."""
        self._file = file
        self._found: dict[str, Any] = json.loads(file.read_text()) if continues else {"failures": []}

    def add(self, name: str, value: Any, is_shown: bool = True) -> None:
        """Add an item. is_shown: whether it is printed."""
        self._found[name] = value
        self._write()
        if is_shown:
            self.show(f"{name}: {json.dumps(_rounded(value))}")

    def show(self, line: str) -> None:
        """Print a line."""
        print(line[:_LONGEST_LINE], flush=True)

    def require(self, holds: bool, otherwise: str) -> None:
        """Record a failure if a condition does not hold."""
        if not holds:
            self._found["failures"].append(otherwise)
            self._write()
            self.show(f"FAILED: {otherwise}")

    def attempt(self, name: str, work: Callable[[], object]) -> bool:
        """Do some work, and return whether it raised nothing.

        An exception is a failure, and the section goes on.
        """
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.require(False, f"{name}: {described(error)}")
            return False
        return True

    def keep_warnings(self) -> None:
        """Keep all warnings of the engine from now on: a fall-back is one."""
        found: list[str] = self._found.setdefault("warnings", [])
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: found.append(record.getMessage()[:_LONGEST_ERROR])  # type: ignore[method-assign]
        logging.getLogger("polydraft").addHandler(handler)

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._found, indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Return a value with three digits of its numbers."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def write_stacks() -> None:
    """Let this process write the stacks of all threads when it is asked to end.

    Forked processes do so, too.
    """
    faulthandler.register(signal.SIGTERM)


def described(error: BaseException) -> str:
    """Return an exception with the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:_LONGEST_ERROR]} ({Path(last.filename).name}, line {last.lineno})"


def require_all(findings: SectionResults, found: Mapping[str, bool]) -> None:
    """Require every fast path: a fall-back would be measured in its place."""
    for name, used in found.items():
        findings.require(used, f"{name}: not used")


def has_cuda() -> bool:
    """Whether torch can use a CUDA device."""
    return torch.cuda.is_available()


def wait(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def middle_s(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the median time of synchronised runs over about this many seconds."""
    work()
    wait(device)
    runs: list[float] = []
    while len(runs) < 5 or (sum(runs) < seconds and len(runs) < 400):
        began = time.perf_counter()
        work()
        wait(device)
        runs.append(time.perf_counter() - began)
    return statistics.median(runs)


def synthetic(num_rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Return the same synthetic numbers every time, without a generator."""
    return torch.linspace(-3, 3, num_rows * width, device=device).view(num_rows, width)


def ceilings(device: torch.device, scale: float) -> dict[str, float]:
    """Measure copied bytes per second, and operations per second of a matrix product."""
    size = (1 << 30) if device.type == "cuda" else (1 << 24)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    width = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = synthetic(width, width, device).to(dtype)
    return {
        "copied_bytes_per_s": 2 * size / middle_s(lambda: target.copy_(source), device, scale / 2),
        "operations_per_s": 2 * width**3 / middle_s(lambda: left @ left, device, scale / 2),
    }


def add_setting(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all sections."""
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu is a dry run")
    parser.add_argument("--target", default="8b", choices=bench_pair.SIZES, help="size of the made target (default 8b)")
    parser.add_argument("--draft", default="0.6b", choices=bench_pair.SIZES, help="of the draft model (default 0.6b)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="tokens (default 151936)")
    parser.add_argument("--acceptance", type=float, default=0.75, help="of a single draft (default 0.75)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all durations; small for a dry run")
