"""Records work as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recorder() -> Iterator[Callable[[Callable[[], None]], torch.cuda.CUDAGraph]]:
    """Yield a function that records work as a CUDA graph. All graphs share one stream and one memory pool, so only one
    may be replayed at a time.

    Work is run once before it is recorded, so that compilation and allocation are not recorded.
    """
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
    finally:
        # A recording that fails leaves its stream active.
        torch.cuda.set_stream(current)
