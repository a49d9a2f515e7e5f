"""Grammars in separate processes: the masks of the library, limits, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from engine.config import GrammarConfig
from engine.errors import DEAD_END, GRAMMAR_UNAVAILABLE, NO_VOCABULARY, NOTHING_LEFT, RequestError
from engine.fixed_edits import FixedEdits
from engine.grammar.grammar import GrammarClient, GrammarPool
from engine.grammar.grammar_process import Begun, Masks, _brief, follow
from engine.grammar.grammar_tokens import Vocabulary, read_vocabulary
from engine.plan import LogitContext
from engine.request import Sampling
from engine.sampling.edits import NodeContext, edit
from engine.text_counts import TextCounts
from tests.server.tiny_models import write_pair

OBJECT = json.dumps({"grammars": [{"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}]})
CRASH = json.dumps({"grammars": [{"json_schema": {"type": "integer", "minimum": -1e19, "maximum": -1e19}}]})
ENDLESS = "start: /x+/ /x+/"
LIMITS = GrammarConfig(start_timeout_s=0.5, mask_timeout_s=0.2, memory_bytes=1 << 29)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = write_pair(tmp_path_factory.mktemp("models")).target
    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    return Vocabulary(str(folder), None, size, [2], LIMITS)


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Iterator[GrammarPool]:
    pool = GrammarPool(vocabulary)
    yield pool
    pool.close()


def started(grammars: GrammarPool, grammar: str) -> GrammarClient:
    """A state that is ready; raises what is wrong with the grammar."""
    state = grammars.start(grammar)
    while not state.is_ready():
        time.sleep(0.002)
    return state


def followed_here(vocabulary: Vocabulary, grammar: str) -> GrammarClient:
    """Follow the grammar in a thread of this process, where coverage and debuggers see it."""
    ours, theirs = socket.socketpair()
    tokenizer = read_vocabulary(vocabulary)

    def run() -> None:
        # A reader that waits for an answer sees the end.
        with Connection(theirs.detach()) as connection:
            follow(connection, tokenizer)

    threading.Thread(target=run, daemon=True).start()
    patient = msgspec.structs.replace(LIMITS, mask_timeout_s=60.0)
    state = GrammarClient(Connection(ours.detach()), grammar, vocabulary.vocab_size, patient, lambda _: None)
    while not state.is_ready():
        time.sleep(0.002)
    return state


def wait_for_end(process_id: int) -> None:
    """Fails where a process still runs after a generous while."""
    for _ in range(3000):
        try:
            stat = Path(f"/proc/{process_id}/stat").read_text()
        except FileNotFoundError:
            return
        if stat.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process_id} still runs")


@pytest.mark.parametrize("here", [False, True])
def test_masks_are_the_library_s_own(grammars: GrammarPool, vocabulary: Vocabulary, here: bool) -> None:
    """Along an answer, and below several drafted paths, some of which end or leave the grammar."""
    tokenizer = read_vocabulary(vocabulary)
    state = followed_here(vocabulary, OBJECT) if here else started(grammars, OBJECT)
    matcher = LLMatcher(tokenizer, OBJECT)
    answer: list[int] = []
    for token in tokenizer.tokenize_str('{"n":12'):
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ends = vocabulary.eos_token_ids
        wrong = int(np.flatnonzero(allowed[: vocabulary.vocab_size] == 0)[0])
        masks = state.masks(answer, [(), (token,), (token, *ends), (wrong,), (token, wrong, wrong)])()
        assert masks[0] is not None
        assert np.array_equal(masks[0], allowed[: vocabulary.vocab_size].astype(bool))
        below = matcher.deep_copy()
        assert below.consume_tokens([token])
        expected = np.unpackbits(np.frombuffer(below.compute_bitmask(), np.uint8), bitorder="little")
        assert masks[1] is not None
        assert np.array_equal(masks[1], expected[: vocabulary.vocab_size].astype(bool))
        assert masks[2] is None
        assert masks[3] is not None
        assert np.flatnonzero(masks[3]).tolist() == ends
        assert masks[4] is not None
        allowed_below = below.deep_copy().consume_tokens([wrong]) and below.deep_copy().consume_tokens([wrong, wrong])
        assert allowed_below or np.flatnonzero(masks[4]).tolist() == ends
        matcher.consume_tokens([token])
        answer.append(token)
    assert state.failure is None
    state.end()


@pytest.mark.slow
@pytest.mark.parametrize("here", [False, True])
def test_a_limit_below_a_drafted_path_does_not_end_the_answer(vocabulary: Vocabulary, here: bool) -> None:
    """The library gives up on a token that its own mask has allowed."""
    tokenizer = read_vocabulary(vocabulary)
    patient = msgspec.structs.replace(LIMITS, mask_timeout_s=60.0)
    grammars = GrammarPool(msgspec.structs.replace(vocabulary, limits=patient))
    grammar = 'start: "[" inner "]"\ninner: a{0,400}\na: b{0,400}\nb: "x" | "xx"'
    (token,) = tokenizer.tokenize_str("x")
    state = followed_here(vocabulary, grammar) if here else started(grammars, grammar)
    answer = tokenizer.tokenize_str("[")
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    matcher.consume_tokens(answer)
    while matcher.deep_copy().consume_tokens([token]):
        matcher.consume_tokens([token])
        answer.append(token)
    here, below, beyond = state.masks(answer, [(), (token,), (token, token)])()
    assert here is not None
    assert here[token]
    for mask in (below, beyond):
        assert mask is not None
        assert not mask[vocabulary.eos_token_ids].any()
        assert mask.any()
    state.masks([*answer, token], [()])()
    assert state.failure is not None
    grammars.close()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("grammar", "reason"),
    [(CRASH, "process has ended"), (ENDLESS, "more than 500 ms"), ("start: nothing", "unknown name")],
)
def test_a_grammar_that_cannot_be_followed_is_refused(grammars: GrammarPool, grammar: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        started(grammars, grammar)
    assert refused.value.code is None, "the grammar is the cause"
    started(grammars, OBJECT).end()


@pytest.mark.slow
def test_grammar_process_failures_are_server_errors(
    grammars: GrammarPool, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """The process that starts the others is killed, gets no time, or has no vocabulary."""
    failures = []
    lost = started(grammars, OBJECT)
    assert grammars.process is not None
    os.kill(grammars.process.pid, signal.SIGKILL)
    while lost.failure is None:  # it may answer before it notices
        lost.masks((), [()])()
    failures.append(lost.failure)
    hasty = msgspec.structs.replace(LIMITS, patience_s=0.0)
    waits = GrammarPool(msgspec.structs.replace(vocabulary, limits=hasty))
    with pytest.raises(RequestError) as refused:
        waits.start(OBJECT).is_ready()
    waits.close()
    failures.append(refused.value)
    empty = GrammarPool(Vocabulary(str(tmp_path), None, 16, [2], LIMITS))
    with pytest.raises(RequestError, match=r"tokenizer\.json") as refused:
        started(empty, OBJECT)
    empty.close()
    failures.append(refused.value)
    expected = [GRAMMAR_UNAVAILABLE, GRAMMAR_UNAVAILABLE, NO_VOCABULARY]
    assert [error and error.code for error in failures] == expected


@pytest.mark.sampled
@pytest.mark.parametrize("here", [False, True])
def test_a_dead_end_has_an_empty_mask(grammars: GrammarPool, vocabulary: Vocabulary, here: bool) -> None:
    """At the answer's end and below a drafted path; at the beginning it is refused."""
    nothing = "T\nT: /[a-c]/ & /[d-f]/"
    grammar = f'start: "a" {nothing}'
    state = followed_here(vocabulary, grammar) if here else started(grammars, grammar)
    (token,) = read_vocabulary(vocabulary).tokenize_str("a")
    masks = state.masks((), [(), (token,)])()
    assert [None if mask is None else np.flatnonzero(mask).tolist() for mask in masks] == [[token], []]
    (mask,) = state.masks((token,), [()])()
    assert mask is not None
    assert not mask.any()
    assert state.failure is None
    state.check_answer([5])
    assert isinstance(state.failure, RequestError)
    assert state.failure.code == DEAD_END
    with pytest.raises(RequestError, match="no answer at all") as refused:
        started(grammars, f"start: {nothing}")
    assert refused.value.code is None


def test_a_reason_is_the_library_s_first_line(vocabulary: Vocabulary) -> None:
    grammar = "start: nothing"
    matcher = LLMatcher(read_vocabulary(vocabulary), grammar, log_level=0)
    with pytest.raises(RequestError) as refused:
        followed_here(vocabulary, grammar)
    assert str(refused.value) == f"the grammar cannot be used: {matcher.get_error().strip().splitlines()[0]}"
    assert len(_brief("x" * 1000)) == 400
    assert _brief(" \n") == "unknown error"


@pytest.mark.parametrize(
    ("expression", "cause"),
    [("([0-9]", "unclosed group"), ("(?=a)b", "look-around, including look-ahead"), (r"\1", "backreferences are")],
)
def test_a_reason_names_the_cause_of_a_refused_expression(vocabulary: Vocabulary, expression: str, cause: str) -> None:
    """The library draws the place in further lines, and names the cause below them."""
    for grammar in (
        LLMatcher.grammar_from_regex(expression),
        LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": expression})),
    ):
        with pytest.raises(RequestError, match=f"regex parse error: {cause}"):
            followed_here(vocabulary, grammar)


@pytest.mark.slow
def test_masks_that_take_too_long_end_their_grammar(grammars: GrammarPool, vocabulary: Vocabulary) -> None:
    hasty = msgspec.structs.replace(LIMITS, mask_timeout_s=0.001)
    other = GrammarPool(msgspec.structs.replace(vocabulary, limits=hasty))
    try:
        slow, quick = started(other, OBJECT), started(grammars, OBJECT)
        slow_masks, quick_masks = slow.masks((), [()] * 5000), quick.masks((), [()])
        assert slow_masks() == [None] * 5000
        assert "more than 1 ms" in str(slow.failure)
        assert slow.failure is not None
        assert slow.failure.code is None, "the grammar is the cause"
        assert quick_masks()[0] is not None
        assert slow.masks((), [()])() == [None]
    finally:
        other.close()


def test_failing_grammar_ends_its_request_alone(grammars: GrammarPool, vocabulary: Vocabulary) -> None:
    """Its own places are free from then on (its request ends), a neighbour's mask holds."""
    bad, good = started(grammars, OBJECT), started(grammars, OBJECT)

    def masked() -> list[bool]:
        sampling = Sampling(grammar="any")
        fixed = FixedEdits(sampling, ())
        places = [NodeContext(sampling, LogitContext((1,), 1, fixed, TextCounts(1), 0, one)) for one in (bad, good)]
        masked_N: list[bool] = torch.isinf(edit(torch.zeros(2, vocabulary.vocab_size), places)).any(1).tolist()
        return masked_N

    assert masked() == [True, True]
    os.kill(bad.process_id, signal.SIGKILL)
    wait_for_end(bad.process_id)
    assert masked() == [False, True]
    assert "process has ended" in str(bad.failure)
    assert isinstance(bad.failure, RequestError)
    assert bad.failure.code == GRAMMAR_UNAVAILABLE
    assert good.failure is None


@pytest.mark.slow
def test_memory_is_limited(vocabulary: Vocabulary) -> None:
    """A grammar that needs more than it may have is refused; with more, the same one is read."""
    words = [f"{number * 7919 % 100_003}" * 10 for number in range(20_000)]
    large = json.dumps({"grammars": [{"json_schema": {"enum": words}}]})
    for memory_bytes, is_enough in ((4 << 20, False), (1 << 29, True)):
        limits = GrammarConfig(start_timeout_s=60.0, memory_bytes=memory_bytes)
        grammars = GrammarPool(msgspec.structs.replace(vocabulary, eos_token_ids=[2], limits=limits))
        try:
            if is_enough:
                started(grammars, large)
            else:
                with pytest.raises(RequestError, match="memory") as refused:
                    started(grammars, large)
                assert refused.value.code is None
        finally:
            grammars.close()


def test_grammar_processes_leave_nothing_behind(grammars: GrammarPool) -> None:
    """Ended states end their processes, those that still compute too; and all end with the pool."""
    ended, busy, left = (started(grammars, OBJECT) for _ in range(3))
    numbers = [state.process_id for state in (ended, busy, left)]
    ended.end()
    busy.masks((), [()] * 100_000)
    busy.end()
    for number in numbers[:2]:
        wait_for_end(number)
    grammars.close()
    wait_for_end(numbers[2])
    left.end()


def test_abandoned_grammar_ends(grammars: GrammarPool) -> None:
    """Its request has been left before the number of its process was known."""
    grammars.start(ENDLESS).end()
    state = started(grammars, OBJECT)  # the process of the first has been forked before this one's
    assert grammars.process is not None
    children = Path(f"/proc/{grammars.process.pid}/task/{grammars.process.pid}/children").read_text().split()
    for child in map(int, children):
        if child != state.process_id:
            wait_for_end(child)


def test_a_pool_whose_process_has_died_starts_another(grammars: GrammarPool) -> None:
    state = started(grammars, OBJECT)
    assert grammars.process is not None
    os.kill(grammars.process.pid, signal.SIGKILL)
    grammars.process.wait()
    started(grammars, OBJECT).end()
    state.end()


@pytest.mark.parametrize(
    ("place", "emitted", "fails"),
    [((), [7], True), ((5,), [5, 7], True), ((5,), [5], False), ((5,), [6, 7], False), ((5, 6), [5, 7], False)],
)
@pytest.mark.parametrize(("mask", "code"), [(b"\0\0", DEAD_END), (b"\x7f\xff", NOTHING_LEFT)])
def test_a_token_that_the_grammar_excludes_fails_the_answer(
    place: tuple[int, ...], emitted: list[int], fails: bool, mask: bytes, code: str
) -> None:
    """A token is drawn even if the grammar, or the grammar and other masks, allow no token."""
    paths: list[tuple[int, ...]] = [(), (5,), (5, 6)]
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as connection, Connection(theirs.detach()) as process:
        state = GrammarClient(connection, OBJECT, 16, LIMITS, lambda _: None)
        wait = state.masks((), paths)
        process.send_bytes(msgspec.msgpack.encode(Begun(os.getpid())))
        masks = [mask if path == place else b"\xff\xff" for path in paths]
        process.send_bytes(msgspec.msgpack.encode(Masks(masks)))
        assert [bool(read is not None and read[7]) for read in wait()] == [path != place for path in paths]
        state.check_answer(emitted)
    if fails:
        assert state.failure is not None
        assert state.failure.code == code
    else:
        assert state.failure is None
