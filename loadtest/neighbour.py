"""Another client of a disturbed daemon.

It measures gaps of a stream, and times of /health on new connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import httpx
import numpy as np

_HEALTH_PAUSE_S = 0.02
_RETRY_S = 0.1
_SHARES = {"p50_ms": 50, "p99_ms": 99, "longest_gap_ms": 100}


async def chunks(client: httpx.AsyncClient, model: str, max_tokens: int = 400) -> AsyncIterator[bytes]:
    """Yield the chunks of one stream.

    Raises httpx.HTTPError if it is refused, and RuntimeError if it breaks off.
    """
    body = {"model": model, "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for chunk in answer.aiter_raw():
            if b'"error"' in chunk:
                raise RuntimeError(f"a stream broke off: {chunk.decode()[:400]}")
            yield chunk


class _Seen:
    """Gaps of the stream and longest time of /health since the last report.

    A pending response counts with its time so far.
    """

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.longest_health_s = 0.0
        self.last_chunk_s: float | None = None
        self.health_since_s: float | None = None

    def chunk(self) -> None:
        """Note the stream's next chunk."""
        now = time.perf_counter()
        if self.last_chunk_s is not None:
            self.gaps_s.append(now - self.last_chunk_s)
        self.last_chunk_s = now

    def take(self) -> dict[str, float]:
        """Return the number of chunks, quantiles of their gaps, the longest time of /health.

        Then the counts begin again.
        """
        now = time.perf_counter()
        num_chunks = len(self.gaps_s)
        pending_s = now - (self.last_chunk_s or now)
        gaps_ms = 1000 * np.array([*self.gaps_s, pending_s])
        health_s = max(self.longest_health_s, now - (self.health_since_s or now))
        self.gaps_s, self.longest_health_s = [], 0.0
        quantiles = {name: float(np.percentile(gaps_ms, share)) for name, share in _SHARES.items()}
        return {"chunks": num_chunks, **quantiles, "longest_health_ms": 1000 * health_s}


async def _stream(url: str, model: str, seen: _Seen) -> None:
    """Read streams in sequence; the time from one that breaks off to the next one is a gap."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, RuntimeError):
                async for _ in chunks(client, model, 1900):
                    seen.chunk()
                seen.last_chunk_s = None
                continue
            await asyncio.sleep(_RETRY_S)


async def _ask_health(url: str, seen: _Seen) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while True:
            began = seen.health_since_s = time.perf_counter()
            with contextlib.suppress(httpx.HTTPError):
                # Probes open a new connection each time.
                await client.get("/health", headers={"connection": "close"})
            seen.longest_health_s = max(seen.longest_health_s, time.perf_counter() - began)
            seen.health_since_s = None
            await asyncio.sleep(_HEALTH_PAUSE_S)


async def _watch(url: str, model: str, connection: Connection) -> None:
    seen = _Seen()
    tasks = [asyncio.create_task(_stream(url, model, seen)), asyncio.create_task(_ask_health(url, seen))]
    while seen.last_chunk_s is None:
        await asyncio.sleep(_RETRY_S)
    connection.send(None)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), asked.set)
    while not any(task.done() for task in tasks):
        await asked.wait()
        asked.clear()
        while connection.poll():
            connection.recv()
            connection.send(seen.take())


def watch(url: str, model: str, connection: Connection) -> None:
    """Watch a daemon until the process is terminated.

    Report the longest times after each message.
    """
    asyncio.run(_watch(url, model, connection))
