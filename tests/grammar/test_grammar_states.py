"""The engine's handling of a grammar's process, message by message.

`test_grammar.py` has real processes.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.config import GrammarConfig
from engine.errors import DEAD_END, GRAMMAR_UNAVAILABLE, RequestError
from engine.grammar import grammar as module
from engine.grammar.grammar import GrammarClient
from engine.grammar.grammar_process import Ask, Begun, Ended, GaveUp, GrammarReady, Masks, Start, encode, to_child
from engine.request import GRAMMAR

VOCABULARY, PROCESS, PATIENCE_S = 13, 77, 30.0
LIMITS = GrammarConfig(start_timeout_s=0.5, mask_timeout_s=0.2)
ANY = b"\xff\x1f"


class Process:
    """The other end of a state's connection, and the clocks."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 100.0
        self.has_gone = False
        self.killed: list[int] = []
        ours, theirs = socket.socketpair()
        self.own = Connection(theirs.detach())
        self.connection = Connection(ours.detach())

    def state(self) -> GrammarClient:
        return GrammarClient(self.connection, "a grammar", VOCABULARY, LIMITS, self.killed.append)

    def cpu(self, clock: int) -> float:
        if self.has_gone:
            raise OSError
        assert clock == (~PROCESS << 3) | 2
        return self.cpu_s

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.own.send_bytes(encode(message))

    def asked(self) -> list[Start | Ask]:
        """Return the messages since the last call."""
        messages = []
        while self.own.poll():
            messages.append(to_child.decode(self.own.recv_bytes()))
        return messages


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made = Process()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.wall_s, clock_gettime=made.cpu))
    yield made
    made.own.close()


@pytest.fixture
def ready(process: Process) -> GrammarClient:
    """A state whose process has read the grammar."""
    state = process.state()
    process.send(Begun(PROCESS), GrammarReady())
    assert state.is_ready()
    process.asked()
    return state


def failure_of(state: GrammarClient) -> tuple[str, str | None]:
    """(reason, code) of a state that has failed."""
    assert isinstance(state.failure, RequestError)
    begin, _, reason = str(state.failure).partition(": ")
    assert (begin, state.failure.param) == ("the grammar cannot be used", GRAMMAR)
    return reason, state.failure.code


def test_a_grammar_is_ready_when_its_process_says_so(process: Process) -> None:
    state = process.state()
    assert process.asked() == [Start("a grammar")]
    assert not state.is_ready()
    process.send(Begun(PROCESS))
    assert not state.is_ready()
    assert state.failure is None
    process.send(GrammarReady())
    assert state.is_ready()
    assert state.is_ready()


def test_each_question_has_what_is_new_of_the_answer(process: Process, ready: GrammarClient) -> None:
    for answer, new in (((), []), ((), []), ((5,), [5]), ((5,), []), ((5, 6, 7), [6, 7])):
        wait = ready.masks(answer, [(), (8, 9)])
        assert process.asked() == [Ask(new, [[], [8, 9]])]
        process.send(Masks([ANY, None]))
        wait()


def test_a_mask_has_a_bit_for_each_token(process: Process, ready: GrammarClient) -> None:
    """The lowest bit of a byte is the first token; bits after the vocabulary are none."""
    wait = ready.masks((), [(), (1,), (2,)])
    process.send(Masks([b"\x05\xf0", None, b"\0\0"]))
    first, second, third = wait()
    assert first is not None
    assert third is not None
    assert (len(first), first.dtype) == (VOCABULARY, np.dtype(bool))
    assert np.flatnonzero(first).tolist() == [0, 2, 12]
    assert second is None
    assert not third.any()


BUSY = "the machine is too busy to follow it; try again"
SILENT = "the process that follows grammars does not answer; try again"


@pytest.mark.parametrize(
    ("is_known", "waited_s", "computed_s", "expected"),
    [
        (False, PATIENCE_S - 0.1, 9.0, None),
        (False, PATIENCE_S, 0.0, (SILENT, GRAMMAR_UNAVAILABLE)),
        (True, 9.0, 0.4375, None),
        (True, 0.5, 0.5, ("it takes more than 500 ms to compute what may follow; make it simpler", None)),
        (True, PATIENCE_S + 0.4375, 0.25, None),
        (True, PATIENCE_S + 0.5, 0.25, (BUSY, GRAMMAR_UNAVAILABLE)),
    ],
)
def test_reading_a_grammar_has_its_time(
    process: Process, is_known: bool, waited_s: float, computed_s: float, expected: Any
) -> None:
    """CPU time of its process, from its beginning on; a process that does not run is waited for."""
    state = process.state()
    if is_known:
        process.wall_s += 1000
        process.cpu_s += 1000
        process.send(Begun(PROCESS))
        state._receive()
    process.wall_s += waited_s
    process.cpu_s += computed_s
    if expected is None:
        assert not state.is_ready()
    else:
        with pytest.raises(RequestError) as refused:
            state.is_ready()
        assert refused.value is state.failure
        assert failure_of(state) == expected
    assert state.seconds_read() == (computed_s if is_known else 0)


def test_a_grammar_that_is_ready_may_wait(process: Process, ready: GrammarClient) -> None:
    process.cpu_s += 99
    process.wall_s += 99
    assert ready.is_ready()


@pytest.mark.parametrize(
    ("waited_s", "computed_s", "reason"),
    [
        (0.0, 0.25, "it takes more than 200 ms to compute what may follow; make it simpler"),
        (PATIENCE_S + 0.25, 0.125, BUSY),
    ],
)
@pytest.mark.parametrize("is_answered", [True, False])
def test_masks_have_their_time(
    process: Process, ready: GrammarClient, waited_s: float, computed_s: float, reason: str, is_answered: bool
) -> None:
    wait = ready.masks((), [(), (1,)])
    process.wall_s += waited_s
    process.cpu_s += computed_s
    if is_answered:
        process.send(Masks([ANY, ANY]))
    masks = wait()
    assert len(masks) == 2
    assert failure_of(ready)[0] == reason
    process.asked()
    assert ready.masks((), [(), (1,), (2,)])() == [None] * 3
    assert process.asked() == [], "nothing is asked of a grammar that has failed"


@pytest.mark.parametrize(("answers", "fails"), [(((5,), (5,)), True), (((), ()), False), (((5,), (5, 6)), False)])
def test_questions_about_one_answer_share_their_time(
    process: Process, ready: GrammarClient, answers: Any, fails: bool
) -> None:
    """About no answer many steps may ask: those of thoughts."""
    for answer in answers:
        wait = ready.masks(answer, [()])
        process.cpu_s += 0.125
        process.wall_s += PATIENCE_S
        process.send(Masks([ANY]))
        wait()
    assert (ready.failure is not None) == fails


@pytest.mark.parametrize(
    ("message", "reason", "code"),
    [
        (GaveUp("no such rule"), "no such rule", None),
        (GaveUp("no vocabulary", GRAMMAR_UNAVAILABLE), "no vocabulary", GRAMMAR_UNAVAILABLE),
        (Ended(-signal.SIGKILL), "its process has ended: the system killed it, probably because memory ran out; try "
         "again", GRAMMAR_UNAVAILABLE),
        (Ended(-signal.SIGXCPU), "it takes more than 500 ms to compute what may follow; make it simpler", None),
        (Ended(-signal.SIGABRT), "its process has ended: it needs more memory than allowed, or crashes; make it "
         "simpler", None),
        (Ended(0), "its process has ended: it needs more memory than allowed, or crashes; make it simpler", None),
        (None, "the process that follows it has ended, or cannot start; try again", GRAMMAR_UNAVAILABLE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_read", [True, False])
def test_failing_process_reports_its_reason(
    process: Process, message: Any, reason: str, code: str | None, is_read: bool
) -> None:
    """While it reads the grammar, or while it is asked. The first reason stays."""
    state = process.state()
    if is_read:
        process.send(Begun(PROCESS), GrammarReady())
        assert state.is_ready()
    if message is None:
        process.own.close()
    else:
        process.send(message, Ended(1))
    if is_read:
        assert state.masks((5,), [(), (1,)])() == [None, None]
    with pytest.raises(RequestError):
        state.is_ready()
    assert failure_of(state) == (reason, code)
    state.check_answer([1, 2])
    assert failure_of(state) == (reason, code)


def test_a_dead_end_is_known_until_the_answer_goes_on(process: Process, ready: GrammarClient) -> None:
    def ask(answer: tuple[int, ...], path: tuple[int, ...], mask: bytes) -> None:
        wait = ready.masks(answer, [path])
        process.send(Masks([mask]))
        wait()

    ask((5,), (7,), b"\0\0")
    ask((5, 6), (), ANY)
    ready.check_answer([7, 8])
    assert ready.failure is None, "it was after another answer"
    ask((5, 6), (7,), b"\0\0")
    ask((5, 6), (), ANY)
    ready.check_answer([7])
    assert ready.failure is None
    ready.check_answer([7, 8])
    assert isinstance(ready.failure, RequestError)
    assert (ready.failure.param, ready.failure.code) == (GRAMMAR, DEAD_END)
    assert "allows no token of this model's vocabulary" in str(ready.failure)


def test_close_kills_a_known_process(process: Process, ready: GrammarClient) -> None:
    ready.end()
    assert process.killed == [PROCESS]
    with pytest.raises(EOFError):
        process.own.recv_bytes()
    unknown = Process()
    unknown.state().end()
    assert unknown.own.recv_bytes() == encode(Start("a grammar"))
    assert unknown.killed == []
    with pytest.raises(EOFError):
        unknown.own.recv_bytes()


def test_the_clock_of_a_process_that_has_gone_stands_still(process: Process, ready: GrammarClient) -> None:
    process.has_gone = True
    wait = ready.masks((5,), [()])
    process.send(Masks([ANY]))
    assert wait()[0] is not None
    assert ready.seconds_read() == 0


def test_cpu_time_is_that_of_the_process() -> None:
    """CPU time of this process, compared with the real clock."""
    measured = Process()
    state = measured.state()
    measured.send(Begun(os.getpid()))
    before = time.process_time()
    assert not state.is_ready()
    began = time.process_time()
    while time.process_time() < began + 0.05:
        pass
    least, seconds, most = time.process_time() - began, state.seconds_read(), time.process_time() - before
    assert least <= seconds + 1e-6
    assert seconds <= most + 1e-6
