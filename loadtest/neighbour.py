"""Another client of a busy daemon: measures gaps of a stream and response times of /health."""

from __future__ import annotations

import asyncio
import contextlib
import time
from multiprocessing.connection import Connection

import httpx

_HEALTH_PAUSE_S = 0.02
_RETRY_S = 0.1


class _Seen:
    """Longest times since the last report; a pending response counts with its time so far."""

    def __init__(self) -> None:
        self.longest_gap_s = self.longest_health_s = 0.0
        self.num_chunks = 0
        self.last_chunk_s: float | None = None
        self.health_since_s: float | None = None

    def chunk(self) -> None:
        """Note the stream's next chunk."""
        now = time.perf_counter()
        self.num_chunks += 1
        if self.last_chunk_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_chunk_s)
        self.last_chunk_s = now

    def take(self) -> tuple[float, float, int]:
        """Return (longest gap, longest /health, number of chunks), and reset them."""
        now = time.perf_counter()
        gap_s = max(self.longest_gap_s, now - (self.last_chunk_s or now))
        health_s = max(self.longest_health_s, now - (self.health_since_s or now))
        num_chunks = self.num_chunks
        self.longest_gap_s, self.longest_health_s, self.num_chunks = 0.0, 0.0, 0
        return gap_s, health_s, num_chunks


async def _stream(url: str, model: str, seen: _Seen) -> None:
    """Read streams in sequence."""
    body = {"model": model, "prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    seen.last_chunk_s = None
                    async for _ in answer.aiter_raw():
                        seen.chunk()
                    seen.last_chunk_s = None
                    if answer.status_code == 200:
                        continue
            await asyncio.sleep(_RETRY_S)


async def _ask_health(url: str, seen: _Seen) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        while True:
            began = seen.health_since_s = time.perf_counter()
            with contextlib.suppress(httpx.HTTPError):
                await client.get("/health")
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
    """Watch a daemon until the process is terminated; report the longest times after each message."""
    asyncio.run(_watch(url, model, connection))
