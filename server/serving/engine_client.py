"""Client of the engine process: submits requests, and distributes each step's results.

One task reads the engine's messages. If the engine ends, every open request gets an
`EngineStopped`, `is_alive` turns false, and the daemon exits. An engine that sleeps has no process,
and holds requests until it wakes (`idle_sleep.py`).
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum

import msgspec

from engine.api import (
    Abort,
    Accepted,
    ConfigError,
    EngineBusy,
    EngineConfig,
    EngineFacts,
    EngineStopped,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Refused,
    Request,
    RequestError,
    StepResults,
    StepStats,
    Stop,
    Submit,
    ToEngine,
    start_process,
)
from server.serving.engine_connection import EngineConnection
from server.serving.ticket import Ticket

log = logging.getLogger("polydraft")

UNATTENDED = 1 << 31
"""Least priority of requests that no client waits for: without time limit or places."""
_POLL_S = 0.25
_STOP_S = 5
"""Time that a stopped engine has to end; then it is killed."""
_KILL_S = 1
"""Time that a killed engine has to end."""
_STOPPED = "the engine has stopped; the daemon is about to exit"
_NOT_AWAKE = (
    "the model could not be loaded again after the engine had slept (--sleep-idle-seconds), and the daemon is about to "
    "exit; its log has the cause"
)


class EngineState(Enum):
    """Whether there is an engine process to send requests to; the values are shown to people."""

    AWAKE = "awake"
    """Also while it loads for the first time, when requests are refused."""
    FALLING_ASLEEP = "falling asleep"
    """The process has been asked to end."""
    ASLEEP = "asleep"
    WAKING = "waking"
    """A new process loads."""


class EngineClient:
    """Exchanges messages with an engine process, which `cli.py` started, and ends it."""

    def __init__(
        self,
        config: EngineConfig,
        max_open_requests: int,
        stall_timeout_s: float = 0.0,
        request_timeout_s: float = 0.0,
        max_queued_tokens: int = 0,
    ) -> None:
        """max_open_requests: running and waiting together; 0 is no limit for all others.

        stall_timeout_s: time without a message while requests are open. request_timeout_s: of a
        call. max_queued_tokens: prompt tokens of requests without a token yet.
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
        self.state = EngineState.AWAKE
        self.is_wanted = asyncio.Event()
        """Set while requests are held."""
        self._tickets: dict[str, Ticket] = {}
        self._held: dict[Ticket, Sequence[Request]] = {}
        """Calls that wait for the engine to wake: all open calls, while it is not awake."""
        self._has_woken = asyncio.Event()
        """Set when a process has loaded, and when the last one has ended."""
        self._idle_since_s = time.monotonic()
        self._stall_timeout_s = stall_timeout_s
        self._request_timeout_s = request_timeout_s
        self._max_queued_tokens = max_queued_tokens
        self._queued_tokens: dict[str, int] = {}
        """Number of prompt tokens of requests without a token yet."""
        self._waiting_since_s: float | None = None
        """Time of the last message, or of the first request after idling; None while idle."""
        self._is_stalled = False

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs, also while it loads, or sleeps."""
        return not self.ended.is_set()

    @property
    def is_stalled(self) -> bool:
        """Return whether the engine is silent for too long with work, clients gone or not."""
        if self.facts is None or not self.is_awake or self._waiting_since_s is None:
            return False
        silence_s = time.monotonic() - self._waiting_since_s
        return 0 < self._stall_timeout_s < silence_s

    @property
    def is_awake(self) -> bool:
        """Whether requests are sent to the engine, and not held."""
        return self.state is EngineState.AWAKE

    @property
    def is_ready(self) -> bool:
        """Whether new requests are served; those that come while the engine sleeps are, too."""
        return self.is_alive and self.facts is not None and not self.is_draining

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    def num_more_urgent(self, priority: int) -> int:
        """Return the number of open requests that are served before a priority."""
        return sum(ticket.priority < priority for ticket in self._tickets.values())

    @property
    def num_held(self) -> int | None:
        """Number of requests that wait for the engine to wake; None while it is awake."""
        return None if self.is_awake else self.num_open

    @property
    def idle_s(self) -> float:
        """Return the time without open requests while awake; 0 otherwise."""
        if self.num_open or self.facts is None or not self.is_awake:
            return 0.0
        return time.monotonic() - self._idle_since_s

    @property
    def engine_pid(self) -> int:
        """Process id of the engine; 0 if there is no process."""
        process = self._connection.process
        return 0 if process.poll() is not None else process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status of the engine process; None while it runs."""
        return self._connection.process.poll()

    def ready_facts(self) -> EngineFacts:
        """Return the engine's facts; raises EngineStopped while no request can be served."""
        if self.failure is not None or not self.is_alive:
            raise EngineStopped(_STOPPED, "engine_stopped")
        if self.is_draining:
            raise EngineStopped("the server is shutting down and accepts no new requests", "draining")
        if self.facts is None:
            raise EngineStopped(f"the model is still loading ({self.loading}); try again soon", "loading")
        return self.facts

    def connect(self, process: subprocess.Popen[bytes]) -> None:
        """Send a new engine process its configuration; `start` or `kill` must follow."""
        log.info("starting the engine")
        self._connection = EngineConnection(process, self.config)

    def kill(self) -> None:
        """Kill the process before anything is read from it."""
        self._connection.kill()

    async def start(self) -> None:
        """Start the task that reads from the process."""
        self._connection.open()
        self._reader = asyncio.create_task(self._read(self._connection))

    async def put_to_sleep(self) -> None:
        """End the process, and return then; later requests are held. None may be open."""
        assert self.is_awake
        assert not self.num_open
        self._send(Stop())
        self.state = EngineState.FALLING_ASLEEP
        self.last_stats = None
        self._waiting_since_s = None
        await asyncio.wait({self._reader}, timeout=_STOP_S)
        if not self._connection.process_has_ended:
            log.warning("the engine process has not ended in %d s and is killed", _STOP_S)
            self._connection.process.kill()
        await asyncio.wait({self._reader})
        self._connection.close()

    async def wake(self) -> None:
        """Start another process; return when it serves, or has failed (`is_alive` is false).

        Held requests are sent to it, or get the error.
        """
        assert self.state is EngineState.ASLEEP
        self.state = EngineState.WAKING
        try:
            process = start_process()
            try:
                # The hub may have other weights by now, and the network may be down.
                self._connection = EngineConnection(process, self.config, is_offline=True)
            except ConfigError:
                process.kill()
                process.communicate()
                raise
        except (OSError, ConfigError) as error:
            self.failure = Failed(f"the engine process cannot be started again: {error}", 1)
            self._end()
            return
        self._has_woken.clear()
        await self.start()
        await self._has_woken.wait()

    async def close(self) -> None:
        """Stop the process and release everything."""
        # A loading engine does not read its messages.
        is_loading = self.facts is None or self.state is EngineState.WAKING
        if not is_loading and not self._connection.process_has_ended:
            self._send(Stop())
            await asyncio.wait({self._reader}, timeout=_STOP_S)
        if not self._connection.process_has_ended:
            self._connection.process.kill()
            await asyncio.wait({self._reader}, timeout=_KILL_S)
        self._reader.cancel()
        self._connection.close()

    @asynccontextmanager
    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[Ticket]:
        """Submit requests, or hold them during a sleep; leaving the block aborts open ones.

        Raises EngineBusy if the queue has no room for all of them, RequestError if it never will,
        and EngineStopped while the engine serves none.
        """
        self.ready_facts()
        self.check_count(len(requests))
        is_unattended = requests[0].priority >= UNATTENDED
        self._check_queue(requests, is_unattended)
        ticket = Ticket(requests, 0.0 if is_unattended else self._request_timeout_s)
        for request in requests:
            self._tickets[request.request_id] = ticket
            self._queued_tokens[request.request_id] = len(request.prompt_token_ids)
        if self.is_awake:
            self._submit(requests)
        else:
            self._held[ticket] = requests
            self.is_wanted.set()
        try:
            yield ticket
        finally:
            self._release(ticket)
            for request_id in ticket.open_ids:
                self.abort(request_id)

    def _submit(self, requests: Sequence[Request]) -> None:
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        self._send(Submit.of(requests))

    def _release(self, ticket: Ticket) -> None:
        """Hold the requests of a call no longer, if they are held."""
        self._held.pop(ticket, None)
        if not self._held:
            self.is_wanted.clear()

    def check_count(self, num_answers: int) -> None:
        """Raise RequestError for a call with more requests than may ever be open."""
        if num_answers > self.max_open_requests:
            raise RequestError(
                f"the call asks for {num_answers} answers (prompts times n), but at most {self.max_open_requests} "
                "requests may be open here; ask for fewer",
                "n",
            )

    def _check_queue(self, requests: Sequence[Request], is_unattended: bool) -> None:
        """Raise EngineBusy if the queue has no room for the requests of a call."""
        before = [name for name, ticket in self._tickets.items() if is_unattended or ticket.priority < UNATTENDED]
        if len(before) + len(requests) > self.max_open_requests:
            raise EngineBusy(
                f"{len(before)} requests are open, the most is {self.max_open_requests} (--max-num-seqs and "
                "--max-num-queued-reqs); try again soon"
            )
        if not self._max_queued_tokens:
            return
        queued = sum(self._queued_tokens.get(name, 0) for name in before)
        new = sum(len(request.prompt_token_ids) for request in requests)
        if queued and queued + new > self._max_queued_tokens:
            raise EngineBusy(
                f"{queued} prompt tokens wait and this call adds {new}, the limit is {self._max_queued_tokens}; "
                "try again soon"
            )

    def abort(self, request_id: str) -> None:
        """Abort one request; no more results arrive for it."""
        if self._forget(request_id) is not None and self.is_awake:
            self._send(Abort(request_id))

    def _forget(self, request_id: str) -> Ticket | None:
        """Forget a request that has ended; return its ticket, None if it was forgotten before."""
        self._queued_tokens.pop(request_id, None)
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._idle_since_s = time.monotonic()
            ticket.open_ids = ticket.open_ids - {request_id}
        return ticket

    def end_all(self, message: str) -> None:
        """End every open request with an `EngineStopped`."""
        for ticket in set(self._tickets.values()):
            ticket.fail(EngineStopped(message))
            self._release(ticket)
        self._tickets.clear()
        self._queued_tokens.clear()

    def _send(self, message: ToEngine) -> None:
        if self.is_alive:
            self._connection.send(message)

    async def _read(self, connection: EngineConnection) -> None:
        try:
            while True:
                message = await connection.receive(_POLL_S)
                if message is not None:
                    self._receive(message)
                elif connection.process_has_ended:
                    break
                self._note_stall()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the engine's messages cannot be read")
        finally:
            if self.state is EngineState.FALLING_ASLEEP and self.failure is None:
                self.state = EngineState.ASLEEP
            else:
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

    def _receive(self, message: FromEngine) -> None:
        self._take(message)
        self._waiting_since_s = time.monotonic() if self.num_open else None

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepResults):
            self._deliver(message)
        elif isinstance(message, Loading):
            self._connection.leave_nothing()
            self.loading = message.text
            log.info("engine: %s", message.text)
        elif isinstance(message, Ready):
            self._connection.leave_nothing()
            self.on_ready(message.facts)
            self.facts = message.facts
            self._idle_since_s = time.monotonic()
            self._send_held()
        elif isinstance(message, Accepted):
            if (ticket := self._tickets.get(message.request_id)) is not None:
                ticket.accept(message.request_id)
        elif isinstance(message, Refused):
            self._refuse(message)
        else:
            self.failure = message

    def _send_held(self) -> None:
        """Be awake, and submit the requests that have waited for that."""
        self.state = EngineState.AWAKE
        self._has_woken.set()
        for ticket, requests in list(self._held.items()):
            ticket.held_s = time.monotonic() - ticket.submitted_s
            self._submit(requests)
            self._release(ticket)

    def _deliver(self, step: StepResults) -> None:
        self.last_stats = step.stats
        self.on_step(step)
        for outcome in step.outcomes:
            self._queued_tokens.pop(outcome.request_id, None)
            ticket = self._tickets.get(outcome.request_id)
            if outcome.finish_reason is not None:
                self._forget(outcome.request_id)
            if ticket is None:
                continue
            if ticket.held_s:
                outcome = msgspec.structs.replace(outcome, queue_s=outcome.queue_s + ticket.held_s)
            ticket.arrivals.put_nowait((outcome, step.stats))

    def _refuse(self, message: Refused) -> None:
        if (ticket := self._forget(message.request_id)) is not None:
            ticket.fail(RequestError(message.message, message.param, message.code))

    def _end(self) -> None:
        """Note that there is no engine any more, and that none will be started."""
        self.ended.set()
        self._has_woken.set()
        self.end_all(_NOT_AWAKE if self.state is EngineState.WAKING else _STOPPED)
