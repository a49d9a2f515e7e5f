"""Runs the lines of open batches, a bounded number at a time.

Lines of all batches take turns. A line begins only while there is room, and its requests have the
last priority: the engine preempts them for requests of interactive clients, and goes on with them
later. Whatever interrupts a line, its next attempt draws the same random numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from engine.api import log_fields
from server.batches.endpoint import NOT_NOW
from server.batches.lines import InputLine, LineRequest, request_of
from server.batches.objects import BatchObject, LineResponse, OutputLine
from server.batches.store import BatchStore
from server.serving.engine_client import UNATTENDED
from server.wire.errors import StorageFault

P = ParamSpec("P")
Result = TypeVar("Result")

log = logging.getLogger("polydraft")

_PAGE = 64
"""Lines whose places are read from the store at once."""
_LOOK_S = 0.02
"""Time between two looks at the load."""
_LOOK_FOR_EXPIRY_S = 1.0
_RETRY_S = 0.25


class EngineLoad(Protocol):
    """State of the engine that decides whether a line may begin (`EngineClient`)."""

    @property
    def is_ready(self) -> bool:
        """Whether new requests are served."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""

    def num_more_urgent(self, priority: int) -> int:
        """Return the number of open requests that come before a priority."""


class Answering(Protocol):
    """Answers lines (`LineEndpoint`)."""

    async def answer(self, request: LineRequest, client: str, line_id: str, shape: tuple[int, int]) -> LineResponse:
        """Return the response of the endpoint."""


class BatchRunner:
    """Runs all batches of a store."""

    repair_s = 30.0
    """Seconds until a batch or a store goes on after an error, such as a full disk."""

    def __init__(
        self, store: BatchStore, endpoint: Answering, load: EngineLoad, at_once: int, shape: tuple[int, int]
    ) -> None:
        """at_once: lines that run at once. shape: of the drafts of new batches."""
        self._store = store
        self._endpoint = endpoint
        self._load = load
        self._at_once = at_once
        self._shape = shape
        self._places = asyncio.Semaphore(at_once)
        self._new: asyncio.Queue[str] = asyncio.Queue()
        self._begun: set[str] = set()
        self._lines_of: dict[str, asyncio.Task[None]] = {}
        """Tasks of the lines of each running batch."""
        self._num_calls = 0
        """Running calls of endpoints."""

    async def run(self) -> None:
        """Run open batches and new ones until cancelled, which aborts running lines."""
        async with asyncio.TaskGroup() as group:
            for batch_id in await self._do(self._store.open_batches):
                self.begin(batch_id)
            while True:
                group.create_task(self._run_batch(await self._new.get()))

    def begin(self, batch_id: str) -> None:
        """Run a batch, unless it runs already."""
        if batch_id not in self._begun:
            self._begun.add(batch_id)
            self._new.put_nowait(batch_id)

    def cancel(self, batch_id: str) -> None:
        """Abort the lines of a batch that the store is cancelling."""
        if (lines := self._lines_of.get(batch_id)) is not None:
            lines.cancel()

    async def _do(self, method: Callable[P, Result], *operands: P.args, **named: P.kwargs) -> Result:
        """Run a method of the store, again and again while the disk is full."""
        while True:
            try:
                return await self._store.database.do(method, *operands, **named)
            except StorageFault:
                await asyncio.sleep(self.repair_s)

    async def _run_batch(self, batch_id: str) -> None:
        """Run a batch to its end, also if an error stops it meanwhile; other batches go on."""
        while True:
            try:
                await self._run_once(batch_id)
                return
            except* Exception as group:
                text = "a batch has stopped and goes on in %.0f s"
                log.error(text, self.repair_s, exc_info=group, extra=log_fields(id=batch_id))
            await asyncio.sleep(self.repair_s)

    async def _run_once(self, batch_id: str) -> None:
        store = self._store
        batch = await self._do(store.validate, batch_id)
        if batch.status == "in_progress":
            lines = asyncio.create_task(self._run_lines(batch))
            self._lines_of[batch_id] = lines
            try:
                await self._until_over(lines, batch)
            finally:
                del self._lines_of[batch_id]
                lines.cancel()
                await asyncio.wait({lines})
            if not lines.cancelled():
                lines.result()
        batch = await self._do(store.finish, batch_id)
        counts = batch.request_counts
        fields = log_fields(id=batch_id, lines=counts.total, completed=counts.completed, failed=counts.failed)
        log.info("batch %s", batch.status, extra=fields)

    async def _until_over(self, lines: asyncio.Task[None], batch: BatchObject) -> None:
        """Wait until the lines have ended, or the batch has expired."""
        while not lines.done() and not self._has_expired(batch):
            await asyncio.wait({lines}, timeout=_LOOK_FOR_EXPIRY_S)

    def _has_expired(self, batch: BatchObject) -> bool:
        return self._store.database.clock() >= batch.expires_at

    async def _run_lines(self, batch: BatchObject) -> None:
        """Run the lines of a batch that have no answer."""
        store = self._store
        last = 0
        shape = await self._do(store.first_shape, batch.id, self._shape)
        async with asyncio.TaskGroup() as group:
            while page := await self._do(store.lines_left, batch.id, last, _PAGE):
                for line in page:
                    await self._places.acquire()
                    if self._has_expired(batch):
                        self._places.release()
                        return
                    task = group.create_task(self._run_line(batch, line, shape))
                    task.add_done_callback(lambda _: self._places.release())
                last = page[-1].number

    async def _run_line(self, batch: BatchObject, line: InputLine, shape: tuple[int, int]) -> None:
        store = self._store
        request = request_of(await self._do(store.read_line, batch.input_file_id, line))
        response = await self._attempt(request, batch.id, line.line_id, shape)
        while response.status_code in NOT_NOW:
            await asyncio.sleep(_RETRY_S)
            response = await self._attempt(request, batch.id, line.line_id, shape)
        answer = OutputLine(line.line_id, line.custom_id, response)
        await self._do(store.record, batch.id, line.number, answer)

    async def _attempt(self, request: LineRequest, client: str, line_id: str, shape: tuple[int, int]) -> LineResponse:
        """Return the response to a line, once there is room."""
        while not self._has_room:
            await asyncio.sleep(_LOOK_S)
        self._num_calls += 1
        try:
            # The call of a line replaces the one of its task.
            return await asyncio.create_task(self._endpoint.answer(request, client, line_id, shape))
        finally:
            self._num_calls -= 1

    @property
    def _has_room(self) -> bool:
        """Return whether a line may begin; one that has begun may not be counted as open yet."""
        num_taken = self._load.num_more_urgent(UNATTENDED) + self._num_calls
        return self._load.is_ready and max(num_taken, self._load.num_open) < self._at_once
