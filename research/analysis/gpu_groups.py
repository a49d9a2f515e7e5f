"""Groups of kernels that are compared and timed in forked processes, for `gpu_kernels.py`.

A kernel that hangs, or that ends its process's use of the device, loses its group alone. A time is
that of a replayed CUDA graph, divided by its runs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from research.analysis.gpu_results import SectionResults, described

_RUNS = 16
"""Least runs in a graph: its own launch is then a small share of its time."""
_ROTATED_BYTES = 192 << 20
"""Data over which the runs of a graph rotate: several times a device's cache."""


class KernelGroup:
    """Results of a group, in its process."""

    def __init__(self, sender: Connection, device: torch.device) -> None:
        self._sender = sender
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.bound = 1e-2 if self.on_cuda else 1e-4
        """Largest error of a kernel that computes in `dtype`."""

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return random numbers on the device, by default in `dtype`."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def case(self, name: str, work: Callable[[], object]) -> None:
        """Do the work of an item; an exception is a failure. Raise it if the device cannot be used
        after it.
        """
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            self.require(False, f"{name}: {described(error)}")
            if self.on_cuda:
                torch.cuda.synchronize()

    def kernel(
        self,
        name: str,
        runs: Sequence[Callable[[], object]],
        num_bytes: float,
        error: float,
        bound: float | None = None,
        operations: float = 0,
    ) -> None:
        """Report a kernel: its time, bytes and operations per second, and error, which must be at
        most `bound`.

        runs: do the same on different data; num_bytes, operations: the least that a run takes;
        bound: by default the bound of kernels that compute in `dtype`.
        """
        bound = self.bound if bound is None else bound
        self.require(error <= bound, f"{name}: differs from plain operations by {error:.2g} (at most {bound:.2g})")
        us = device_us(runs, self.device)
        item = {"us": round(us, 2), "GBps": round(num_bytes / us / 1e3, 1), "error": error}
        self.add(name, item | ({"TFLOPs": round(operations / us / 1e6, 1)} if operations else {}))

    def add(self, name: str, value: object) -> None:
        """Report an item."""
        self._sender.send(("item", name, value))

    def require(self, holds: bool, otherwise: str) -> None:
        """Report a failure if a condition does not hold."""
        if not holds:
            self._sender.send(("failure", otherwise, None))


def rotations(num_bytes: int) -> int:
    """Return on how many sets of data of this size a kernel is timed."""
    return max(1, min(_RUNS, _ROTATED_BYTES // max(1, num_bytes)))


def device_us(runs: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the microseconds of a run, in a replayed graph of all runs in turn; on a CPU, of the
    first run alone.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        runs[0]()
        return 1e6 * (time.perf_counter() - began)
    repeats = -(-_RUNS // len(runs))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for run in runs:
                run()
    times = []
    for _ in range(6):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)))
    return 1e3 * statistics.median(times[1:]) / (repeats * len(runs))


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, in float64; NaN if a number is not finite."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def run_group(
    name: str, work: Callable[[KernelGroup], None], device: torch.device, findings: SectionResults, limit_s: float
) -> None:
    """Run a group in a forked process, to its end or its time limit. This process must not have
    used CUDA.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_in_process, args=(name, work, sender, device), daemon=True)
    began = time.monotonic()
    process.start()
    sender.close()
    last, is_stopped = "its start", False
    while not is_stopped:
        try:
            is_stopped = not receiver.poll(max(0.0, began + limit_s - time.monotonic()))
            if not is_stopped:
                kind, text, value = receiver.recv()
                if kind == "item":
                    last = text
                    findings.add(text, value)
                else:
                    findings.require(False, text)
        except EOFError:
            break
    if is_stopped:
        process.terminate()  # it writes where it is
        process.join(1)
        process.kill()
    process.join(5)
    findings.require(not is_stopped, f"{name}: stopped after {limit_s:g} s, after {last}")
    findings.require(is_stopped or process.exitcode == 0, f"{name}: ended with {process.exitcode}, after {last}")
    findings.add(f"{name}: seconds", round(time.monotonic() - began, 1))


def _in_process(name: str, work: Callable[[KernelGroup], None], sender: Connection, device: torch.device) -> None:
    """Run a group in its own process."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(1)
    with torch.inference_mode():
        group = KernelGroup(sender, device)
        group.case(name, lambda: work(group))
