"""Requests of one HTTP call while they run, and what the engine returns for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from engine.api import DeadlineExceeded, Outcome, Request, StepStats

StepPart = tuple[Outcome, StepStats]
_TOO_LATE = "the request took longer than this server lets one take (--request-timeout); ask for fewer tokens"


class Ticket:
    """Requests of one HTTP call while they run, and their results in order."""

    def __init__(self, requests: Sequence[Request], most_s: float = 0.0) -> None:
        """most_s: time limit from now on, 0 for none; after it, waiting raises DeadlineExceeded."""
        self.index_of = {request.request_id: index for index, request in enumerate(requests)}
        self.open_ids = set(self.index_of)
        self.priority = min(request.priority for request in requests)
        self.submitted_s = time.monotonic()
        self.held_s = 0.0
        """Time that the requests have waited for the engine to wake."""
        self.arrivals: asyncio.Queue[StepPart | Exception] = asyncio.Queue()
        self._undecided = {request.request_id for request in requests if request.sampling.grammar}
        self._is_decided = asyncio.Event()
        self._error: Exception | None = None
        self._deadline_s: float | None = None
        if most_s:
            self._deadline_s = asyncio.get_running_loop().time() + most_s
        if not self._undecided:
            self._is_decided.set()

    async def grammars_ready(self) -> None:
        """Wait until the grammars of all requests are compiled; raises the error of a bad one."""
        async with self._in_time():
            await self._is_decided.wait()
        if self._error is not None:
            raise self._error

    def accept(self, request_id: str) -> None:
        """Note that a request's grammar is compiled, of which the engine reports."""
        self._undecided.discard(request_id)
        if not self._undecided:
            self._is_decided.set()

    def fail(self, error: Exception) -> None:
        """End waiting with an error, because one of the requests cannot continue."""
        self._error = error
        self._is_decided.set()
        self.arrivals.put_nowait(error)

    async def parts(self) -> AsyncGenerator[tuple[int, Outcome, StepStats], None]:
        """Yield (request index, outcome, statistics) until all requests have ended."""
        while self.open_ids or not self.arrivals.empty():
            async with self._in_time():
                part = await self.arrivals.get()
            if isinstance(part, Exception):
                raise part
            outcome, stats = part
            yield self.index_of[outcome.request_id], outcome, stats

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(_TOO_LATE) from error
