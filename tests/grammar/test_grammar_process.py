"""The process that starts a child for each grammar: its messages and limits."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.config import GrammarConfig
from engine.errors import NO_VOCABULARY
from engine.grammar.grammar_process import (
    KILL,
    START,
    Ask,
    Begun,
    Ended,
    GaveUp,
    GrammarMatcher,
    GrammarReady,
    Masks,
    Start,
    encode,
    from_child,
    serve,
)
from engine.grammar.grammar_tokens import Vocabulary, read_vocabulary
from tests.server.tiny_models import write_pair

GRAMMAR = 'start: "ab" | "ac"'
MEMORY_BYTES = 1 << 29
INFINITE = resource.RLIM_INFINITY


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = write_pair(tmp_path_factory.mktemp("models")).target
    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    return Vocabulary(str(folder), None, size, [2], GrammarConfig(memory_bytes=MEMORY_BYTES, start_timeout_s=6.5))


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    return read_vocabulary(vocabulary)


class Served:
    """A process that serves, as the engine sees it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process_id = os.fork()
        if not self.process_id:
            status = 1
            try:
                self.control.close()
                serve(theirs)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self.control.send(encode(vocabulary))

    def begin(self) -> Child:
        """A child that has begun."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [START], [theirs.fileno()])
        return Child(Connection(ours.detach()))

    def end(self) -> int | None:
        """Its exit status once the engine has gone; None if that is known."""
        self.control.close()
        if not self.process_id:
            return None
        status = os.waitstatus_to_exitcode(os.waitpid(self.process_id, 0)[1])
        self.process_id = 0
        return status


class Child:
    """A grammar's process, as the engine sees it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        begun = self.hear()
        assert isinstance(begun, Begun)
        self.process_id = begun.process_id

    def hear(self) -> Any:
        return from_child.decode(self.connection.recv_bytes())

    def ask(self, message: Start | Ask) -> Any:
        self.connection.send_bytes(encode(message))
        return self.hear()

    @property
    def limits(self) -> tuple[int, int]:
        """Return the limits of CPU time and of additional memory."""
        pages = int(Path(f"/proc/{self.process_id}/statm").read_text().split()[0])
        memory = resource.prlimit(self.process_id, resource.RLIMIT_AS)[0]
        more = memory if memory == INFINITE else memory - pages * resource.getpagesize()
        return resource.prlimit(self.process_id, resource.RLIMIT_CPU)[0], more


def until(condition: Callable[[], bool]) -> None:
    """Fails after a generous while."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def is_gone(process_id: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def served(vocabulary: Vocabulary) -> Iterator[Served]:
    made = Served(vocabulary)
    yield made
    assert made.end() in (0, None)


@pytest.mark.slow
def test_children_follow_grammars_beside_each_other(served: Served, tokenizer: LLTokenizer) -> None:
    first, second = served.begin(), served.begin()
    assert first.process_id != second.process_id
    assert second.ask(Start('start: "b"')) == GrammarReady()
    assert first.ask(Start(GRAMMAR)) == GrammarReady()
    masks = first.ask(Ask([], [[]]))
    matcher = LLMatcher(tokenizer, GRAMMAR)
    assert masks == Masks([bytes(matcher.compute_bitmask())])
    assert second.ask(Ask([], [[]])) != masks
    refused = served.begin().ask(Start("start: nothing"))
    assert isinstance(refused, GaveUp)
    assert refused.code is None


def test_a_child_is_limited(served: Served) -> None:
    """In time while it reads the grammar, memory and turns; prints are lost."""
    child = served.begin()
    until(lambda: child.limits[0] != INFINITE)
    assert child.limits[0] == 8, "whole seconds, and one more"
    number = child.process_id
    until(lambda: os.readlink(f"/proc/{number}/fd/2") == os.devnull)
    assert MEMORY_BYTES - (1 << 24) < child.limits[1] <= MEMORY_BYTES
    assert resource.prlimit(number, resource.RLIMIT_CORE) == (0, 0)
    assert os.getpriority(os.PRIO_PROCESS, number) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert Path(f"/proc/{number}/oom_score_adj").read_text() == "1000\n"
    assert child.ask(Start(GRAMMAR)) == GrammarReady()
    assert child.limits[0] == INFINITE, "questions have a limit each, which the engine sees to"


def test_a_child_has_its_own_end_alone(served: Served) -> None:
    """Else another's engine would not see its end."""
    first = served.begin()
    second = served.begin()
    until(lambda: os.readlink(f"/proc/{second.process_id}/fd/2") == os.devnull)
    sockets = [
        [os.readlink(link) for link in Path(f"/proc/{child.process_id}/fd").iterdir()] for child in (first, second)
    ]
    first_sockets, second_sockets = ({link for link in links if link.startswith("socket:")} for links in sockets)
    assert len(second_sockets) <= len(first_sockets), "the first child's end is closed in the second"


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_child_is_reported_to_its_own_engine(served: Served, number: int) -> None:
    children = [served.begin() for _ in range(3)]
    for child in children[:2]:
        os.kill(child.process_id, number)
    for child in children[:2]:
        assert child.hear() == Ended(-number)
        with pytest.raises(EOFError):
            child.hear()
    assert children[2].ask(Start(GRAMMAR)) == GrammarReady()


def test_a_child_ends_when_its_engine_has_left(served: Served) -> None:
    left = served.begin()
    left.connection.close()
    until(lambda: is_gone(left.process_id))
    assert served.begin().ask(Start(GRAMMAR)) == GrammarReady()


def test_only_children_are_killed_and_on_demand(served: Served, vocabulary: Vocabulary) -> None:
    killed, living, stranger = served.begin(), served.begin(), Served(vocabulary)
    for number in (stranger.process_id, killed.process_id):
        served.control.send(KILL + number.to_bytes(8, "little"))
    assert killed.hear() == Ended(-signal.SIGKILL)
    assert living.ask(Start(GRAMMAR)) == GrammarReady()
    assert stranger.begin().ask(Start(GRAMMAR)) == GrammarReady()
    assert stranger.end() == 0


@pytest.mark.slow
def test_children_end_with_the_engine_and_with_their_parent(vocabulary: Vocabulary) -> None:
    for is_killed in (False, True):
        served = Served(vocabulary)
        children = [served.begin() for _ in range(2)]
        for child in children:
            assert child.ask(Start(GRAMMAR)) == GrammarReady()
        if is_killed:
            os.kill(served.process_id, signal.SIGKILL)
        assert served.end() == (-signal.SIGKILL if is_killed else 0)
        for child in children:
            until(lambda child=child: is_gone(child.process_id))


def test_without_a_vocabulary_every_grammar_is_given_up(tmp_path: Path) -> None:
    served = Served(Vocabulary(str(tmp_path), None, 16, [2], GrammarConfig(memory_bytes=MEMORY_BYTES)))
    for _ in range(2):
        child = served.begin()
        reason = "structured output needs the model's tokenizer.json; it cannot be read: there is none"
        assert child.hear() == GaveUp(reason, NO_VOCABULARY)
        assert child.hear() == Ended(0)
    assert served.end() == 0


def test_the_vocabulary_is_the_models(vocabulary: Vocabulary) -> None:
    """It may have more tokens than its tokenizer, and not fewer; it may name no end."""
    named = read_vocabulary(vocabulary)
    assert named.vocab_size >= vocabulary.vocab_size
    assert named.eos_tokens == [2]
    wide = read_vocabulary(msgspec.structs.replace(vocabulary, vocab_size=9000, eos_token_ids=[]))
    assert wide.vocab_size == 9000
    assert wide.eos_tokens
    assert read_vocabulary(msgspec.structs.replace(vocabulary, vocab_size=1)).vocab_size > 1


def bits(mask: bytes | None) -> set[int]:
    return {token for token in range(8 * len(mask or b"")) if (mask or b"")[token // 8] >> token % 8 & 1}


def test_masks_are_those_of_the_grammar_after_each_path(tokenizer: LLTokenizer) -> None:
    """Only an end after a path that the grammar does not have; nothing after an end."""
    a, b, c = (tokenizer.tokenize_str(one)[0] for one in "abc")
    follower = GrammarMatcher(tokenizer, GRAMMAR)
    assert follower.fault == ""
    (end,) = tokenizer.eos_tokens
    paths = [(), (a,), (a, b), (b,), (a, b, c), (a, b, end), (end,)]
    masks = follower.masks([], paths)
    assert a in bits(masks[0])
    assert {b, c} <= bits(masks[1])
    assert [bits(mask) for mask in masks[2:5]] == [{end}] * 3
    assert masks[5:] == [None, None]
    assert follower.fault == ""
    assert {bits(mask) == {end} for mask in follower.masks([a, b], [()])} == {True}
    assert {bits(mask) == {end} for mask in follower.masks([], [()])} == {True}, "the answer is remembered"


def test_an_answer_that_the_grammar_does_not_have_is_a_fault(tokenizer: LLTokenizer) -> None:
    a, b = (tokenizer.tokenize_str(one)[0] for one in "ab")
    follower = GrammarMatcher(tokenizer, GRAMMAR)
    follower.masks([b, a], [()])
    assert follower.fault
    assert "\n" not in follower.fault


def test_below_a_path_that_the_grammar_lacks_stand_all_ends(vocabulary: Vocabulary) -> None:
    ends = [2, 3, 17, 200]
    tokens = read_vocabulary(msgspec.structs.replace(vocabulary, eos_token_ids=ends))
    (mask,) = GrammarMatcher(tokens, GRAMMAR).masks([], [tokens.tokenize_str("b")])
    assert bits(mask) == set(ends)


def test_a_dead_end_is_a_fault_at_the_beginning_alone(tokenizer: LLTokenizer) -> None:
    nothing = "T\nT: /[a-c]/ & /[d-f]/"
    assert GrammarMatcher(tokenizer, f"start: {nothing}").fault == "it allows no answer at all"
    follower = GrammarMatcher(tokenizer, f'start: "a" {nothing}')
    (a,) = tokenizer.tokenize_str("a")
    here, below = follower.masks([], [(), (a,)])
    assert bits(here) == {a}
    assert here is not None
    assert below == bytes(len(here))
    assert follower.masks([a], [()]) == [bytes(len(here))]
    assert follower.fault == ""


@pytest.mark.slow
def test_below_a_limit_of_the_library_an_answer_must_not_end(tokenizer: LLTokenizer) -> None:
    """The library gives up on a token that its own mask has allowed."""
    grammar = 'start: "[" inner "]"\ninner: a{0,400}\na: b{0,400}\nb: "x" | "xx"'
    (x,) = tokenizer.tokenize_str("x")
    matcher, answer = LLMatcher(tokenizer, grammar, log_level=0), tokenizer.tokenize_str("[")
    matcher.consume_tokens(answer)
    while matcher.deep_copy().consume_tokens([x]):
        matcher.consume_tokens([x])
        answer.append(x)
    follower = GrammarMatcher(tokenizer, grammar)
    here, *below = follower.masks(answer, [(), (x,), (x, x)])
    assert here is not None
    assert x in bits(here)
    all_tokens = {*range(4096)}
    assert [all_tokens - bits(mask) for mask in below] == [{*tokenizer.eos_tokens}] * 2
    assert follower.fault == ""
    follower.masks([x], [()])
    assert follower.fault
