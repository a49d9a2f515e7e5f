"""Records work as CUDA graphs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

WAITS = "synchronizing CUDA operation"
"""Part of torch's message about an operation that the host waits for."""


class Graphs(Protocol):
    """A device's recordings of work."""

    def free_bytes(self) -> int: ...

    def recorder(self) -> AbstractContextManager[Callable[[Callable[[], None]], torch.cuda.CUDAGraph]]:
        """Return a function that records work, for as long as its context is open."""
        ...

    def without_waits(self) -> AbstractContextManager[None]:
        """Raise RuntimeError with `WAITS` in its text if the host waits in its context."""
        ...


class CudaGraphs:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def recorder(self) -> AbstractContextManager[Callable[[Callable[[], None]], torch.cuda.CUDAGraph]]:
        """Return a function that records work, for as long as its context is open."""
        return recorder()

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """Raise RuntimeError with `WAITS` in its text if the host waits in its context."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def graphs_on(device: torch.device) -> CudaGraphs | None:
    """Return what records the work of a device; None if nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


@contextmanager
def recorder() -> Iterator[Callable[[Callable[[], None]], torch.cuda.CUDAGraph]]:
    """Yield a function that records work as a CUDA graph.

    All graphs share a stream and a memory pool, so one is replayed at a time. Work runs once
    before, so that compilation and allocation are not recorded. Torch's cached memory is given back
    before and after, so that free memory shows what graphs take.
    """
    gc.collect()  # an engine that has ended may still hold some
    torch.cuda.empty_cache()
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
        return graph

    try:
        yield record
        current.wait_stream(stream)
        torch.cuda.empty_cache()
    finally:
        # A recording that fails leaves its stream active.
        torch.cuda.set_stream(current)
