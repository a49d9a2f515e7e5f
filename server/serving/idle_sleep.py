"""Sleep of an idle engine: its process ends, and another starts at the next request.

The end of the process releases all that it holds: weights, K/V, compiled code, the prefix cache
and what the controller has learnt. The HTTP process stays, so all that needs no engine is
answered during a sleep.
"""

from __future__ import annotations

import asyncio
import logging
import time

from server.serving.engine_client import EngineClient
from server.serving.metrics import ServerMetrics

log = logging.getLogger("polydraft")


class IdleSleep:
    """Puts the engine of a client to sleep, and wakes it."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics, idle_s: float) -> None:
        """idle_s: time without a request, after which the engine sleeps."""
        self._client = client
        self._metrics = metrics
        self._idle_s = idle_s

    async def run(self) -> None:
        """Sleep and wake in turns, until cancelled or until the engine has failed."""
        while self._client.is_alive:
            await self._become_idle()
            await self._fall_asleep()
            await self._client.is_wanted.wait()
            await self._wake()

    async def _become_idle(self) -> None:
        """Return when no request has been open for as long as configured."""
        while (left_s := self._idle_s - self._client.idle_s) > 0:
            await asyncio.sleep(left_s)

    async def _fall_asleep(self) -> None:
        started_s = time.monotonic()
        await self._client.put_to_sleep()
        if not self._client.is_alive:
            return
        self._metrics.fall_asleep()
        log.info(
            "engine asleep after %.0f s without a request: its process ended in %.1f s and its memory is free; the "
            "next request wakes it",
            self._idle_s,
            time.monotonic() - started_s,
        )

    async def _wake(self) -> None:
        log.info("waking the engine, because a request waits")
        started_s = time.monotonic()
        self._metrics.begin_waking()
        await self._client.wake()
        if not self._client.is_alive:
            return
        duration_s = time.monotonic() - started_s
        self._metrics.wake(duration_s)
        log.info("engine awake after %.1f s", duration_s)
