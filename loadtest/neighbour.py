"""Another client of a disturbed daemon: measures gaps of a stream, and times of /health on new
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import httpx
import numpy as np
from tqdm import tqdm

_HEALTH_PAUSE_S = 0.02
_RETRY_S = 0.1
_STALL_MS = 100


async def chunks(client: httpx.AsyncClient, model: str, max_tokens: int = 400) -> AsyncIterator[bytes]:
    """Yield the chunks of one stream. Raises httpx.HTTPError if it is refused, and RuntimeError if
    it breaks off.
    """
    body = {"model": model, "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for chunk in answer.aiter_raw():
            if b'"error"' in chunk:
                raise RuntimeError(f"a stream broke off: {chunk.decode()[:400]}")
            yield chunk


@dataclass
class Disturbance:
    """Requests that disturb a neighbour in every other turn, and the observations."""

    is_on: bool = False
    gaps_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Gaps between chunks of the neighbour's streams, without and with the disturbance."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Answers to the disturbing requests."""
    num_streams: int = 0

    async def watch(self, client: httpx.AsyncClient, model: str) -> None:
        """Read the neighbour's streams until cancelled. A gap in which the turn changes is left
        out.
        """
        while True:
            self.num_streams += 1
            before: tuple[float, bool] | None = None
            async for _ in chunks(client, model):
                now = time.perf_counter(), self.is_on
                if before is not None and before[1] == now[1]:
                    self.gaps_s[now[1]].append(now[0] - before[0])
                before = now

    async def alternate(self, work: Sequence[Coroutine[None, None, None]], turns_s: Sequence[float]) -> float:
        """Run work in turns without and with the disturbance, and return the seconds of the latter;
        raises the error that ends one of it early.
        """
        tasks, on_s = [asyncio.create_task(one) for one in work], 0.0
        try:
            for number, turn_s in enumerate(tqdm(turns_s, unit="turn", disable=None)):
                self.is_on = number % 2 == 1
                began = time.monotonic()
                ended, _ = await asyncio.wait(tasks, timeout=turn_s, return_when=asyncio.FIRST_EXCEPTION)
                on_s += (time.monotonic() - began) * self.is_on
                for task in ended:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return on_s

    def gaps_ms(self) -> dict[str, dict[str, float]]:
        """Return the number of chunks, and quantiles of the gaps, without (`alone`) and with
        (`beside`) it.
        """
        return {name: _quantiles(self.gaps_s[is_on]) for name, is_on in (("alone", False), ("beside", True))}


def _quantiles(gaps_s: Sequence[float]) -> dict[str, float]:
    gaps_ms = 1000 * np.array(gaps_s or [0.0])
    shares = {"p50": 50, "p99": 99, "p99.9": 99.9, "longest": 100}
    quantiles = {name: round(float(np.percentile(gaps_ms, share)), 2) for name, share in shares.items()}
    return {"count": len(gaps_s), f"over_{_STALL_MS}_ms": int((gaps_ms > _STALL_MS).sum()), **quantiles}


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
    """Watch a daemon until the process is terminated; report the longest times after each
    message.
    """
    asyncio.run(_watch(url, model, connection))
