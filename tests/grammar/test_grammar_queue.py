"""Requests wait for their grammars in turn; no grammar is real here."""

from __future__ import annotations

from typing import Any

from engine.errors import GRAMMAR_UNAVAILABLE, RequestError
from engine.grammar.grammar_queue import GrammarQueue
from engine.request import GRAMMAR, Request, Sampling
from tests.wrong import instead


class Slow:
    """A source whose grammars become ready on command."""

    def __init__(self) -> None:
        self.open: list[Slow] = []
        self.failure: RequestError | None = None
        self.is_read = self.is_ended = False
        self.read_s = 0.0
        self.grammar = ""

    def start(self, grammar: str) -> Slow:
        self.open.append(Slow())
        self.open[-1].grammar = grammar
        return self.open[-1]

    def seconds_read(self) -> float:
        return self.read_s

    def is_ready(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.is_read

    def end(self) -> None:
        self.is_read, self.is_ended = False, True

    def masks(self, answer: object, paths: object) -> object:
        raise AssertionError("not asked here")


def test_requests_wait_for_their_grammars_in_turn() -> None:
    """Two at most are followed; who is refused or leaves makes room."""
    source = Slow()
    queue = GrammarQueue(source, 2)  # type: ignore[arg-type]
    for name in "abcd":
        queue.add(Request(request_id=name, prompt_token_ids=(1,), sampling=Sampling(grammar=name)))
    urgent = Request(request_id="u", prompt_token_ids=(1,), sampling=Sampling(grammar="u"), priority=-1)
    assert queue.ready() == ([], [])
    assert (len(source.open), queue.num_waiting) == (2, 4)
    source.open[0].is_read = True
    assert [one.request_id for one, _ in queue.ready()[0]] == ["a"]
    assert (len(source.open), queue.num_waiting) == (2, 3)
    source.open[1].failure = RequestError("no")
    assert [name for name, _ in queue.ready()[1]] == ["b"]
    queue.ready()
    assert len(source.open) == 3
    assert queue.end("d")
    queue.add(urgent)
    queue.add(Request(request_id="e", prompt_token_ids=(1,), sampling=Sampling(grammar="e")))
    assert not queue.end("a")
    queue.ready()
    assert (len(source.open), queue.num_waiting) == (4, 3)
    source.open[3].is_read = True
    assert [one.request_id for one, _ in queue.ready()[0]] == ["u"]
    reason = source.open[3].failure = RequestError("not any further")
    assert queue.failed() == [("u", reason)]
    assert not queue.end("u")
    assert queue.failed() == []
    assert not source.open[3].is_read, "it is ended"


def test_grammars_that_cannot_be_started_wait_for_others_to_end() -> None:
    """The engine continues, and a request that waits alone is refused."""
    source = Slow()
    queue = GrammarQueue(source, 9)  # type: ignore[arg-type]

    def ask(name: str) -> None:
        queue.add(Request(request_id=name, prompt_token_ids=(1,), sampling=Sampling(grammar=name)))

    def refuse(*_: Any) -> None:
        raise OSError("too many open files")

    ask("a")
    queue.ready()
    with instead(source, "start", refuse):
        ask("b")
        assert queue.ready() == ([], [])
        assert queue.num_waiting == 2
        queue.end("a")
        ((name, error),) = queue.ready()[1]
    assert name == "b"
    assert "too many open files" in str(error)
    assert (error.param, error.code) == (GRAMMAR, GRAMMAR_UNAVAILABLE)
    for number in range(9):
        ask(str(number))
    queue.ready()
    assert len(source.open) == 1 + 4, "more than four are read at once"


def test_costly_grammars_leave_room_for_others() -> None:
    """Twenty that are never read, then an ordinary one.

    It begins once each place has seen a first slice, while at most two costly ones are
    read further, in turn.
    """
    source = Slow()
    queue = GrammarQueue(source, 64)  # type: ignore[arg-type]
    for number in range(20):
        queue.add(Request(request_id=str(number), prompt_token_ids=(1,), sampling=Sampling(grammar="costly")))
    queue.add(Request(request_id="honest", prompt_token_ids=(1,), sampling=Sampling(grammar="honest")))
    for _ in range(30):
        queue.ready()
        running = [grammar for grammar in source.open if not grammar.is_ended]
        assert len(running) <= 4
        for grammar in running:
            grammar.read_s += 0.2
            grammar.is_read = grammar.grammar == "honest"
        if any(grammar.grammar == "honest" for grammar in running):
            break
    assert [grammar.request_id for grammar, _ in queue.ready()[0]] == ["honest"]
    assert sum(grammar.is_ended for grammar in source.open) <= 20
    for _ in range(9):
        queue.ready()
        for grammar in source.open:
            grammar.read_s += 0.2
    running = [grammar for grammar in source.open if not grammar.is_ended and grammar.grammar == "costly"]
    assert 2 <= len(running) < 4, "there is a place for who comes next"
    assert queue.num_waiting == 20
    running[-1].failure = RequestError("too long")
    ((failed, _),) = queue.ready()[1]
    assert queue.num_waiting == 19
    assert all(queue.end(str(number)) for number in range(20) if str(number) != failed)
    assert queue.num_waiting == 0


def started_by(queue: GrammarQueue, source: Slow, round_s: float, num_rounds: int) -> list[str]:
    """Return the grammars started in some rounds, each of which reads all open ones."""
    for _ in range(num_rounds):
        queue.ready()
        for grammar in source.open:
            grammar.read_s += round_s
            grammar.failure = RequestError("too long") if grammar.read_s > 1.5 else None
    return [grammar.grammar for grammar in source.open]


def ask(queue: GrammarQueue, client: str, *names: str, priority: int = 0) -> None:
    for name in names:
        sampling = Sampling(grammar=name)
        queue.add(Request(request_id=name, prompt_token_ids=(1,), sampling=sampling, client=client, priority=priority))


def test_clients_take_turns() -> None:
    """Another client's grammars begin between twenty costly ones, in any of the queues."""
    source = Slow()
    queue = GrammarQueue(source, 64)  # type: ignore[arg-type]
    costly = [f"costly {number}" for number in range(20)]
    ask(queue, "many", *costly)
    assert started_by(queue, source, 0.3, 1) == costly[:4]
    ask(queue, "few", "ordinary", "large")
    ask(queue, "many", "urgent", priority=-1)
    started = started_by(queue, source, 0.3, 12)
    assert started[4:9] == ["urgent", costly[4], "ordinary", costly[5], "large"]


def test_a_large_grammar_is_read_while_new_ones_come() -> None:
    """It begins again, in its client's turn, though others' first slices never end."""
    source = Slow()
    queue = GrammarQueue(source, 64)  # type: ignore[arg-type]
    ask(queue, "many", *(f"costly {number}" for number in range(400)))
    ask(queue, "few", "large")
    started = started_by(queue, source, 0.3, 40)
    assert started.count("large") == 2
    assert queue.num_waiting > 300


def test_costly_grammar_continues_if_none_waits() -> None:
    source = Slow()
    queue = GrammarQueue(source, 64)  # type: ignore[arg-type]
    queue.add(Request(request_id="a", prompt_token_ids=(1,), sampling=Sampling(grammar="costly")))
    queue.ready()
    source.open[0].read_s = 9.0
    queue.ready()
    assert not source.open[0].is_ended
    assert len(source.open) == 1


def test_abandoned_costly_grammars_keep_their_seats() -> None:
    source = Slow()
    queue = GrammarQueue(source, 64)  # type: ignore[arg-type]
    ask(queue, "many", *"abcd")
    started_by(queue, source, 0.3, 4)
    assert not any(one.is_ended for one in source.open)


def test_two_costly_grammars_are_read_on() -> None:
    """The next begins when one is ready."""
    source = Slow()
    queue = GrammarQueue(source, 64)  # type: ignore[arg-type]

    def running() -> list[str]:
        for _ in range(4):
            queue.ready()
        return [one.grammar for one in source.open if not one.is_ended and not one.is_read]

    def read(seconds: float) -> None:
        for grammar in source.open:
            grammar.read_s += seconds

    ask(queue, "many", *"abcdef")
    assert running() == [*"abcd"]
    read(0.25)
    assert running() == [*"abcd"]
    read(0.01)
    assert running() == [*"aefb"], "new ones come before costly ones, of which two are read on"
    read(0.26)
    assert running() == [*"afb"], "there are two already, and one place is free for what comes next"
    source.open[0].is_read = True
    assert running() == [*"fbc"]


def test_a_grammar_fails_alone() -> None:
    source = Slow()
    queue = GrammarQueue(source, 9)  # type: ignore[arg-type]
    ask(queue, "few", "a", "b")
    queue.ready()
    for grammar in source.open:
        grammar.is_read = True
    queue.ready()
    assert queue.failed() == []
    source.open[1].failure = RequestError("no 0")
    assert queue.failed() == [("b", source.open[1].failure)]
