"""The engine process: read the inbox, run a step, deliver the results, repeat.

One thread owns all engine state and the device. A request that cannot be served is answered with a `Refused`; any other
error ends the process with a `Failed`. The process exits when its parent has ended.
"""

from __future__ import annotations

import contextlib
import gc
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
    default_speculation,
    encode,
)
from engine.config import EngineConfig
from engine.errors import ConfigError, LoadError, RequestError
from engine.logs import set_up_log, show_given_names
from engine.step.engine import Engine, Failures, StepResult

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


class Loop:
    """Steps and messages of an engine.

    If passes run on a device, a step's results are delivered, and requests are taken, while the next step's target pass
    runs. An `Abort`, and all messages after it, wait until the step ends, because the device still writes its blocks.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine, self._mailbox = engine, mailbox
        self._unread: deque[ToEngine] = deque()
        self._result: StepResult | None = None
        """Result of the last step if it has not been delivered."""

    def read(self) -> bool:
        """Do what the waiting messages ask for; return False at a `Stop`."""
        self._unread += map(decode_to_engine, self._mailbox.receive(0 if self._unread else _wait_ms(self._engine)))
        while self._unread:
            message = self._unread.popleft()
            if isinstance(message, Stop):
                self._deliver()
                return False
            if isinstance(message, Submit):
                _submit(self._engine, message, self._mailbox)
            elif self._engine.abort(message.request_id) and not self._engine.scheduler.has_work:
                self._deliver()
                # No later step will report that the memory is free.
                self._mailbox.send(StepResults([], self._engine.stats()))
        self._queue_followed()
        return True

    def run_step(self) -> None:
        """Run a step, and deliver its results or those of the step before."""
        engine = self._engine
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


def _wait_ms(engine: Engine) -> int:
    """Return how long to wait for a message: 0 while there is work, and a short time while a grammar is being read."""
    if engine.scheduler.has_work:
        return 0
    return _GRAMMAR_POLL_MS if engine.grammar_queue.num_waiting else _IDLE_POLL_MS


def start(config: EngineConfig, mailbox: Mailbox) -> Engine:
    """Load and announce the engine; before that, as configured, measure its steps, check its rule and warm it up."""
    import torch

    from engine.control.controller import Controller
    from engine.start.building import build_engine
    from engine.start.calibration import measure
    from engine.start.compiling import compile_kernels
    from engine.start.host import cpu_threads, keep_freed_memory, return_freed_memory
    from engine.start.rehearsal import rehearse

    keep_freed_memory()
    torch.set_num_threads(cpu_threads(config.model))

    def progress(text: str) -> None:
        mailbox.send(Loading(config.model.shown(text)))

    compile_kernels(config.model, progress)
    engine = build_engine(config, progress)
    speculation = default_speculation(config.speculation, engine.facts)
    if config.calibrate:
        engine.scheduler.times = times = measure(engine, config, speculation, progress)
        if speculation.adapts_shape:
            engine.scheduler.controller = Controller(times, engine.limits.max_draft_length)
    if config.self_check and engine.facts.has_draft and speculation.num_drafts:
        from engine.start.distribution_check import short_check  # scipy.stats takes a while to import

        short_check(engine, speculation, progress)
    _restart_garbage_collection()
    return_freed_memory()
    if config.calibrate:
        progress("rehearsing")
        rehearse(engine, speculation)
    mailbox.send(Ready(engine.facts))
    return engine


def _restart_garbage_collection() -> None:
    """Collect once, exempt all loaded objects from later collections, and enable the collector again.

    Each later collection would otherwise scan them, and stop the steps for a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def main() -> int:
    """Run the process; return 0 after a stop, 1 after an engine or load error, 2 for a bad configuration."""
    with contextlib.suppress(Exception):  # raised again, and reported, when they are used
        import engine.start.building
        import engine.start.calibration  # noqa: F401  (while the other process reads its settings)
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
