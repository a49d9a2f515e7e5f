"""Client of the engine process: submits requests, distributes the results of each step, and detects its end.

One task reads the engine's messages. If the engine ends, every open request gets an `EngineStopped`, `is_alive` turns
false, and the daemon exits.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from engine.api import (
    Abort,
    Accepted,
    DeadlineExceeded,
    EngineBusy,
    EngineConfig,
    EngineFacts,
    EngineStopped,
    Failed,
    FromEngine,
    Loading,
    Outcome,
    Ready,
    Refused,
    Request,
    RequestError,
    StepResults,
    StepStats,
    Stop,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
    launch,
)
from server.serving.socket_folder import INBOX, OUTBOX, SocketFolder

log = logging.getLogger("polydraft")

StepPart = tuple[Outcome, StepStats]
_POLL_S = 0.25
_STOP_S = 5
"""Time that a stopped engine has to end; then it is killed."""
_TOO_LATE = "the request took longer than this server lets one take (--request-timeout); ask for fewer tokens"


class Ticket:
    """Requests of one HTTP call while they run, and their results in order."""

    def __init__(self, requests: Sequence[Request], most_s: float = 0.0) -> None:
        """most_s: time limit from now on, 0 for none; after it, waiting raises DeadlineExceeded."""
        self.index_of = {request.request_id: index for index, request in enumerate(requests)}
        self.open_ids = set(self.index_of)
        self.priority = min(request.priority for request in requests)
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
        """Note that a request's grammar is compiled; the engine reports this only for requests with a grammar."""
        self._undecided.discard(request_id)
        if not self._undecided:
            self._is_decided.set()

    def fail(self, error: Exception) -> None:
        """End waiting with an error, because one of the requests cannot continue."""
        self._error = error
        self._is_decided.set()
        self.arrivals.put_nowait(error)

    async def parts(self) -> AsyncGenerator[tuple[int, Outcome, StepStats], None]:
        """Yield (index of the request, its outcome, the step's statistics) until all requests have ended."""
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


class EngineClient:
    """Configures an engine process that `cli.py` has started, exchanges messages with it, and ends it."""

    def __init__(
        self,
        config: EngineConfig,
        max_open_requests: int,
        stall_timeout_s: float = 0.0,
        request_timeout_s: float = 0.0,
        max_queued_tokens: int = 0,
    ) -> None:
        """max_open_requests: running and waiting requests together. stall_timeout_s: time without a message while
        requests are open. request_timeout_s: time limit of a call. max_queued_tokens: prompt tokens of requests without
        a token yet. 0 means no limit, except for max_open_requests.
        """
        self.config = config
        self.max_open_requests = max_open_requests
        self.facts: EngineFacts | None = None
        self.loading = "starting the engine process"
        self.failure: Failed | None = None
        self.last_stats: StepStats | None = None
        self.on_ready: Callable[[EngineFacts], None] = lambda _: None
        self.on_step: Callable[[StepResults], None] = lambda _: None
        self.ended = asyncio.Event()
        self.is_draining = False
        self._tickets: dict[str, Ticket] = {}
        self._stall_timeout_s = stall_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_queued_tokens = max_queued_tokens
        self._queued_tokens: dict[str, int] = {}
        """Number of prompt tokens of requests without a token yet."""
        self._waiting_since_s: float | None = None
        """Time of the engine's last message, or of the first request after it was idle; None while it is idle."""
        self._is_stalled = False

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs, also while it loads."""
        return not self.ended.is_set()

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has work and has been silent for too long, also if its clients have left meanwhile."""
        if self.facts is None or self._waiting_since_s is None:
            return False
        silence_s = time.monotonic() - self._waiting_since_s
        return 0 < self._stall_timeout_s < silence_s

    @property
    def is_ready(self) -> bool:
        """Whether new requests are served."""
        return self.is_alive and self.facts is not None and not self.is_draining

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    def num_more_urgent(self, priority: int) -> int:
        """Return the number of open requests that are served before a priority."""
        return sum(ticket.priority < priority for ticket in self._tickets.values())

    def ready_facts(self) -> EngineFacts:
        """Return the engine's facts; raises EngineStopped while no request can be served."""
        if self.failure is not None or not self.is_alive:
            raise EngineStopped("the engine has stopped; the daemon is about to exit", "engine_stopped")
        if self.is_draining:
            raise EngineStopped("the server is shutting down and accepts no new requests", "draining")
        if self.facts is None:
            raise EngineStopped(f"the model is still loading ({self.loading}); try again soon", "loading")
        return self.facts

    def connect(self, process: subprocess.Popen[bytes]) -> None:
        """Bind the sockets, and send a new engine process its configuration; `start` or `kill` must follow."""
        log.info("starting the engine")
        self.process = process
        self._folder = SocketFolder()
        inbox = f"ipc://{self._folder.name}/{INBOX}"
        outbox = f"ipc://{self._folder.name}/{OUTBOX}"
        self._context = zmq.Context()
        self._bound_inbox = self._bind(zmq.PUSH, inbox)
        self._bound_outbox = self._bind(zmq.PULL, outbox)
        try:
            launch(process, self.config, inbox, outbox)
        except BaseException:  # also a signal that ends this process
            self._context.destroy(linger=0)
            self._folder.cleanup()
            raise

    def _bind(self, socket_type: int, address: str) -> zmq.Socket[bytes]:
        """Return a socket with an unlimited queue, bound to an address."""
        socket = self._context.socket(socket_type)
        socket.set_hwm(0)
        socket.bind(address)
        return socket

    def kill(self) -> None:
        """Kill the process before anything is read from it."""
        self.process.kill()
        self.process.wait()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def start(self) -> None:
        """Start the task that reads from the process."""
        # Asynchronous wrappers of sockets that were bound before the event loop existed.
        self._to_engine = zmq.asyncio.Socket.from_socket(self._bound_inbox)
        self._from_engine = zmq.asyncio.Socket.from_socket(self._bound_outbox)
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Stop the process and release everything."""
        if self.process.poll() is None:
            self._send(Stop())
            # A loading engine does not read its messages.
            timeout_s = 0 if self.facts is None else _STOP_S
            try:
                await asyncio.wait_for(self.ended.wait(), timeout_s)
            except TimeoutError:
                self.process.kill()
        self._reader.cancel()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    @asynccontextmanager
    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[Ticket]:
        """Submit requests; leaving the block aborts the requests that still run.

        Raises EngineBusy if the queue has no room for all of them, RequestError if it never will, and EngineStopped
        while the engine serves none.
        """
        self.ready_facts()
        self.check_count(len(requests))
        if self.num_open + len(requests) > self.max_open_requests:
            raise EngineBusy(
                f"{self.num_open} requests are open, the most is {self.max_open_requests} (--max-num-seqs and "
                "--max-num-queued-reqs); try again soon"
            )
        self._check_queued_tokens(requests)
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        ticket = Ticket(requests, self._request_timeout_s)
        for request in requests:
            self._tickets[request.request_id] = ticket
            self._queued_tokens[request.request_id] = len(request.prompt_token_ids)
        self._send(Submit.of(requests))
        try:
            yield ticket
        finally:
            for request_id in ticket.open_ids:
                self.abort(request_id)

    def check_count(self, num_answers: int) -> None:
        """Raise RequestError for a call with more requests than may ever be open."""
        if num_answers > self.max_open_requests:
            raise RequestError(
                f"the call asks for {num_answers} answers (prompts times n), but at most {self.max_open_requests} "
                "requests may be open here; ask for fewer",
                "n",
            )

    def _check_queued_tokens(self, requests: Sequence[Request]) -> None:
        if not self._max_queued_tokens:
            return
        queued = sum(self._queued_tokens.values())
        new = sum(len(request.prompt_token_ids) for request in requests)
        if queued and queued + new > self._max_queued_tokens:
            raise EngineBusy(
                f"{queued} prompt tokens wait and this call adds {new}, the limit is {self._max_queued_tokens}; "
                "try again soon"
            )

    def abort(self, request_id: str) -> None:
        """Abort one request; no more results arrive for it."""
        if self._forget(request_id) is not None:
            self._send(Abort(request_id))

    def _forget(self, request_id: str) -> Ticket | None:
        """Forget a request that has ended; return its ticket, None if it was forgotten before."""
        self._queued_tokens.pop(request_id, None)
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            ticket.open_ids = ticket.open_ids - {request_id}
        return ticket

    def end_all(self, message: str) -> None:
        """End every open request with an `EngineStopped`."""
        for ticket in set(self._tickets.values()):
            ticket.fail(EngineStopped(message))
        self._tickets.clear()
        self._queued_tokens.clear()

    def _send(self, message: ToEngine) -> None:
        if self.is_alive:
            # The socket's queue is unlimited, so the send completes at once.
            self._to_engine.send(encode(message))

    async def _read(self) -> None:
        try:
            while True:
                if await self._from_engine.poll(_POLL_S * 1000):
                    self._receive(await self._from_engine.recv())
                elif self.process.poll() is not None:
                    break
                self._note_stall()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the engine's messages cannot be read")
        finally:
            self._end()

    def _note_stall(self) -> None:
        """Log once that steps no longer complete, or that they complete again."""
        if self.is_stalled and not self._is_stalled:
            log.error(
                "engine stalled: no step has completed for %.0f s; %d requests are open",
                self._stall_timeout_s,
                self.num_open,
            )
        elif self._is_stalled and not self.is_stalled:
            log.warning("engine recovered: steps complete again")
        self._is_stalled = self.is_stalled

    def _receive(self, data: bytes) -> None:
        self._take(decode_from_engine(data))
        self._waiting_since_s = time.monotonic() if self.num_open else None

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepResults):
            self._deliver(message)
        elif isinstance(message, Loading):
            self._leave_nothing()
            self.loading = message.text
            log.info("engine: %s", message.text)
        elif isinstance(message, Ready):
            self._leave_nothing()
            self.on_ready(message.facts)
            self.facts = message.facts
        elif isinstance(message, Accepted):
            if (ticket := self._tickets.get(message.request_id)) is not None:
                ticket.accept(message.request_id)
        elif isinstance(message, Refused):
            self._refuse(message)
        else:
            self.failure = message

    def _leave_nothing(self) -> None:
        """Remove the folder of the sockets if both are connected, so that a killed process does not leave it."""
        if self._bound_inbox.poll(0, zmq.POLLOUT):
            self._folder.cleanup()

    def _deliver(self, step: StepResults) -> None:
        self.last_stats = step.stats
        self.on_step(step)
        for outcome in step.outcomes:
            self._queued_tokens.pop(outcome.request_id, None)
            ticket = self._tickets.get(outcome.request_id)
            if outcome.finish_reason is not None:
                self._forget(outcome.request_id)
            if ticket is not None:
                ticket.arrivals.put_nowait((outcome, step.stats))

    def _refuse(self, message: Refused) -> None:
        if (ticket := self._forget(message.request_id)) is not None:
            ticket.fail(RequestError(message.message, message.param, message.code))

    def _end(self) -> None:
        self.ended.set()
        self.end_all("the engine has stopped; the daemon is about to exit")
