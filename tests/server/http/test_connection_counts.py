"""The number of connections, and of warnings about them, in memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from server.http.connections import Seldom
from tests.server.memory_server import GET, LINGER_S, TIMEOUT_S, Server


@pytest.fixture
def small() -> Iterator[Server]:
    made = Server(most=3)
    made.may_answer.clear()
    yield made
    made.may_answer.set()
    made.pass_s(0)
    made.loop.close()


def test_the_connection_that_has_waited_longest_makes_room(small: Server, caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = (small.connect() for _ in range(3))
    assert not caplog.records
    small.may_answer.set()
    small.send(first, GET)
    assert first.statuses == [200]
    small.may_answer.clear()
    small.send(third, GET)
    fourth = small.connect()
    assert [wire.ended for wire in (first, second, third, fourth)] == ["", "", "", ""]
    assert second.error["type"] == "service_unavailable"
    assert "3 connections are open" in caplog.text
    assert "--max-connections" in caplog.text
    fifth = small.connect()
    assert [wire.ended for wire in (first, third, fourth, fifth)] == ["aborted", "", "", ""]


def test_connections_that_are_answered_are_not_closed(small: Server) -> None:
    answering = [small.connect() for _ in range(3)]
    for wire in answering:
        small.send(wire, GET)
    newest = small.connect()
    assert newest.statuses == [503]
    assert newest.error["type"] == "service_unavailable"
    assert "try again soon" in newest.error["message"]
    assert [wire.ended for wire in answering] == ["", "", ""]
    small.pass_s(LINGER_S + 1)
    assert newest.ended == "aborted"
    small.may_answer.set()
    small.pass_s(0)
    assert [wire.statuses for wire in answering] == [[200]] * 3
    assert small.connect().written == b""


def test_closed_connections_are_forgotten(small: Server) -> None:
    for _ in range(9):
        wire = small.connect()
        small.send(wire, b"GET")
        wire.close()
        small.pass_s(0)
        assert not small.waiting.order
    small.pass_s(TIMEOUT_S + 1)
    assert wire.written == b"", "no timer is left"


def test_a_warning_passes_once_a_minute_and_errors_always(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seldom = Seldom()

    def passes(level: int, message: str) -> bool:
        return seldom.filter(logging.LogRecord("a", level, "", 0, message, (), None))

    assert passes(logging.WARNING, "one")
    assert passes(logging.WARNING, "two")
    now[0] += 59.5
    assert not passes(logging.WARNING, "one")
    assert not passes(logging.INFO, "one")
    assert passes(logging.ERROR, "one")
    assert passes(logging.ERROR, "one")
    now[0] += 0.5
    assert passes(logging.WARNING, "one")
    assert not passes(logging.WARNING, "one")
