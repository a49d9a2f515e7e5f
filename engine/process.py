"""The engine process: read the inbox, run a step, deliver the results, repeat.

One thread owns all engine state and the device. `Refused` answers a request that cannot be served;
any other error ends the process with `Failed`. It exits with its parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import deque

import zmq

from engine.api import (
    Accepted,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Refused,
    StepResults,
    Stop,
    Submit,
    ToEngine,
    decode_launch,
    decode_to_engine,
    encode,
)
from engine.config import EngineConfig
from engine.errors import ConfigError, LoadError, RequestError
from engine.logs import set_up_log, show_given_names
from engine.step.engine import Engine, Failures, StepResult
from engine.step.idle import IdleSteps

log = logging.getLogger("polydraft")

_IDLE_POLL_MS = 500
_GRAMMAR_POLL_MS = 2


class Mailbox:
    """The two sockets, with unbounded queues: the engine never waits for the HTTP process."""

    def __init__(self, inbox: str, outbox: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket, address in ((self._inbox, inbox), (self._outbox, outbox)):
            socket.set_hwm(0)
            socket.connect(address)
        self._parent = os.getppid()

    def send(self, message: FromEngine) -> None:
        """Deliver a message to the server."""
        self._outbox.send(encode(message))

    def receive(self, wait_ms: int) -> list[bytes]:
        """Return all waiting messages, after at least one has arrived or `wait_ms` have passed."""
        if wait_ms:
            self._inbox.poll(wait_ms)
        messages = []
        while True:
            try:
                messages.append(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages

    @property
    def is_orphaned(self) -> bool:
        """Whether the process that started this one has ended."""
        return os.getppid() != self._parent

    def close(self) -> None:
        """Flush sent messages, then close."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=2000)
        self._context.term()


def serve(engine: Engine, mailbox: Mailbox) -> None:
    """Run steps while there is work, until a `Stop` arrives or the parent process ends."""
    loop = Loop(engine, mailbox)
    while not mailbox.is_orphaned and loop.read():
        if engine.scheduler.has_work:
            loop.run_step()
        else:
            loop.idle.take()


class Loop:
    """Steps and messages of an engine.

    If passes run on a device, a step's results are delivered, and requests are taken, while the
    next step's target pass runs. An `Abort`, and all messages after it, wait until the step ends,
    because the device still writes its blocks.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine, self._mailbox = engine, mailbox
        self.idle = IdleSteps(engine)
        self._unread: deque[ToEngine] = deque()
        self._result: StepResult | None = None
        """Result of the last step until it is delivered."""

    def read(self) -> bool:
        """Do what the waiting messages ask for; return False at a `Stop`."""
        self._unread += map(decode_to_engine, self._mailbox.receive(self._wait_ms()))
        while self._unread:
            message = self._unread.popleft()
            if isinstance(message, Stop):
                self._deliver()
                return False
            if isinstance(message, Submit):
                _submit(self._engine, message, self._mailbox)
            elif self._engine.abort(message.request_id) and not self._engine.scheduler.has_work:
                self._deliver()
                self.idle.end()
                # No later step will report that the memory is free.
                self._mailbox.send(StepResults([], self._engine.stats()))
        self._queue_followed()
        return True

    def _wait_ms(self) -> int:
        """Return how long to wait for a message: 0 with work, shortly while a grammar is read."""
        engine = self._engine
        if self._unread or engine.scheduler.has_work:
            return 0
        if engine.grammar_queue.num_waiting:
            return _GRAMMAR_POLL_MS
        return 0 if self.idle.are_due else _IDLE_POLL_MS

    def run_step(self) -> None:
        """Run a step, and deliver its results or the results of the step before."""
        engine = self._engine
        self.idle.end()
        try:
            result = engine.run_step(self._meanwhile if engine.works_meanwhile else None)
        finally:  # a step that fails must not take the results of another one with it
            self._deliver()
        self._result = result
        if not engine.works_meanwhile or not engine.scheduler.has_work:
            self._deliver()
        if not engine.scheduler.has_work:
            engine.scheduler.check_invariants()

    def _meanwhile(self) -> None:
        self._deliver()
        self._unread += map(decode_to_engine, self._mailbox.receive(0))
        while self._unread and isinstance(self._unread[0], Submit):
            _submit(self._engine, self._unread.popleft(), self._mailbox)  # type: ignore[arg-type]
        self._queue_followed()

    def _deliver(self) -> None:
        result, self._result = self._result, None
        if result is not None:
            self._mailbox.send(StepResults(result.outcomes, result.learn()))
            _refuse(result.failed, self._mailbox)

    def _queue_followed(self) -> None:
        """Queue the requests whose grammars have been read."""
        accepted, refused = self._engine.queue_followed()
        for request_id in accepted:
            self._mailbox.send(Accepted(request_id))
        _refuse(refused, self._mailbox)


def _submit(engine: Engine, message: Submit, mailbox: Mailbox) -> None:
    requests = message.requests()
    try:
        engine.submit(*requests)
    except RequestError as error:
        _refuse([(request.request_id, error) for request in requests], mailbox)


def _refuse(failures: Failures, mailbox: Mailbox) -> None:
    for request_id, error in failures:
        mailbox.send(Refused(request_id, str(error), error.param, error.code))


def start(config: EngineConfig, mailbox: Mailbox) -> Engine:
    """Start the engine (`start/starting.py`), and announce its progress and that it is ready."""
    # Imported by `main` before; an error is raised again here, where it is reported.
    from engine.start.starting import start_engine

    def progress(text: str) -> None:
        mailbox.send(Loading(config.model.shown(text)))

    engine = start_engine(config, progress)
    mailbox.send(Ready(engine.facts))
    return engine


def main() -> int:
    """Run; return 0 after a stop, 1 after an engine or load error, 2 for a bad config."""
    with contextlib.suppress(Exception):  # raised again, and reported, by `start`
        # Here, because it takes seconds, in which the other process reads its settings.
        import engine.start.starting  # noqa: F401
    message = sys.stdin.buffer.read()
    if not message:  # the parent has ended before it sent a `Launch`
        return 0
    launch = decode_launch(message)
    if launch.is_offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    mailbox, shown = Mailbox(launch.inbox, launch.outbox), launch.config.model.shown
    try:
        set_up_log("warning", launch.config.log_format)
        show_given_names(shown)
        serve(start(launch.config, mailbox), mailbox)
    except ConfigError as error:
        mailbox.send(Failed(shown(str(error)), 2))
        return 2
    except LoadError as error:
        mailbox.send(Failed(shown(str(error)), 1))
        return 1
    except Exception as error:
        log.exception("the engine has failed and its process ends")
        mailbox.send(Failed(shown(f"{type(error).__name__}: {error}"), 1))
        return 1
    finally:
        mailbox.close()
    return 0
