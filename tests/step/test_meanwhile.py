"""On a device, results are delivered and requests are taken while the next step's pass runs.

The tests run that loop on a CPU. A message that arrives in the middle of a step comes out of the
second call of `receive` after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from engine import process
from engine.api import (
    Abort,
    FromEngine,
    Refused,
    StepResults,
    Stop,
    Submit,
    ToEngine,
    encode,
)
from engine.request import Request
from engine.step.engine import Engine
from tests.engine import tiny
from tests.wrong import instead

DRAFTS = tiny.Speculation(rule="bv_race", num_drafts=2, draft_length=3)


class Script:
    """A mailbox whose messages come one batch a call; after them, an idle engine is stopped."""

    is_orphaned = False

    def __init__(self, batches: Iterable[list[ToEngine]]) -> None:
        self._batches = list(batches)
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def receive(self, wait_ms: int) -> list[bytes]:
        if self._batches:
            return [encode(message) for message in self._batches.pop(0)]
        return [encode(Stop())] if wait_ms else []

    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for message in self.sent:
            for outcome in message.outcomes if isinstance(message, StepResults) else ():
                found.setdefault(outcome.request_id, []).extend(outcome.token_ids)
        return found

    def ends(self) -> Counter[str]:
        """Number of final events of each request."""
        found: Counter[str] = Counter()
        for message in self.sent:
            if isinstance(message, Refused):
                found[message.request_id] += 1
            elif isinstance(message, StepResults):
                found.update(one.request_id for one in message.outcomes if one.finish_reason is not None)
        return found


def built(works_meanwhile: bool) -> Engine:
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.05), num_blocks=60, max_num_seqs=4)
    engine.works_meanwhile = works_meanwhile
    return engine


def request(number: int, max_tokens: int = 12) -> Request:
    prompt = [3 + (number * 7 + at) % 90 for at in range(4 + number % 9)]
    return tiny.request(str(number), prompt, DRAFTS, max_tokens=max_tokens, temperature=1.0, seed=number)


def served(engine: Engine, batches: Iterable[list[ToEngine]]) -> Script:
    script = Script(batches)
    process.serve(engine, script)  # type: ignore[arg-type]
    engine.scheduler.check_invariants()
    assert engine.scheduler.tables.target.num_used == 0
    return script


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_request_has_the_same_answer_and_one_end(seed: int) -> None:
    """Requests, refused ones and aborts arrive between steps and in the middle of them."""
    chance = random.Random(seed)
    batches: list[list[ToEngine]] = []
    aborted: set[str] = set()
    for number in range(14):
        # Longer than the context: refused.
        one = request(number, max_tokens=500 if number % 6 == 5 else 12)
        batch: list[ToEngine] = [Submit.of([one])]
        if number and chance.random() < 0.5:
            gone = str(chance.randrange(number + 1))
            aborted.add(gone)
            batch.append(Abort(gone))
        batches += [batch, *[[] for _ in range(chance.randrange(3))]]
    alone = {str(n): tiny.run(built(False), [request(n)]).tokens[str(n)] for n in range(14) if n % 6 != 5}
    for works_meanwhile in (False, True):
        script = served(built(works_meanwhile), batches)
        found, ends = script.tokens(), script.ends()
        for name, answer in alone.items():
            assert found.get(name, []) == answer[: len(found.get(name, []))]
            assert name in aborted or (found[name] == answer and ends[name] == 1)
        assert ends["5"] == ends["11"] == 1
        assert all(ends[name] <= 1 for name in ends)


def test_a_request_is_taken_and_a_result_delivered_in_the_middle_of_a_step() -> None:
    engine = built(works_meanwhile=True)
    log: list[str] = []
    forward, verify = engine.unrecorded.forward, engine.unrecorded.verify
    script = Script([[Submit.of([request(1)])], [], [], [Submit.of([request(2)])]])
    send, submit = script.send, engine.submit

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            log.append(name)
            return function(*arguments)

        return call

    for owner, name, function in (
        (engine.unrecorded, "forward", forward),
        (engine.unrecorded, "verify", verify),
        (script, "send", send),
        (engine, "submit", submit),
    ):
        setattr(owner, name, noted(name, function))
    process.serve(engine, script)  # type: ignore[arg-type]
    assert log[:7] == ["submit", "forward", "verify", "forward", "send", "submit", "verify"]
    assert log[-1] == "send", "the last result does not wait for a step that never comes"
    assert script.ends() == {"1": 1, "2": 1}


def test_on_a_cpu_a_result_is_delivered_at_once() -> None:
    engine = built(works_meanwhile=False)
    assert tiny.build(tiny.llama(1), None).works_meanwhile == (tiny.DEVICE.type != "cpu")
    script = Script([[Submit.of([request(1)])]])
    steps: list[int] = []
    with instead(engine, "run_step", lambda run_step, *rest: (steps.append(len(script.sent)), run_step(*rest))[1]):
        process.serve(engine, script)  # type: ignore[arg-type]
    assert len(steps) > 2
    assert steps == list(range(len(steps)))


def test_an_abort_in_the_middle_of_a_step_would_break_it() -> None:
    """The wrong variant: all messages are read there."""

    def reads_all(_: Any, loop: process.Loop) -> None:
        loop._deliver()
        loop.read()

    batches: list[list[ToEngine]] = [[Submit.of([request(1)])], [Abort("1")]]
    assert served(built(works_meanwhile=True), batches).ends()["1"] == 0
    with instead(process.Loop, "_meanwhile", reads_all), pytest.raises(KeyError):
        served(built(works_meanwhile=True), batches)


@pytest.mark.parametrize("where", ["draw", "forward", "verify"])
def test_a_step_that_fails_leaves_the_results_of_the_one_before(where: str) -> None:
    engine, script = built(works_meanwhile=True), Script([[Submit.of([request(1)])]])
    calls = 0

    def fails(right: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the device is gone")
        return right(*arguments)

    with instead(engine.unrecorded, where, fails), pytest.raises(RuntimeError, match="the device is gone"):
        process.serve(engine, script)  # type: ignore[arg-type]
    assert sum(isinstance(message, StepResults) for message in script.sent) == 2


def test_every_step_is_learnt_from_once_and_before_the_next_is_committed() -> None:
    engine, script = built(works_meanwhile=True), Script([[Submit.of([request(1)])]])
    log: list[str] = []
    learn, commit = engine.telemetry.learn, engine.scheduler.commit
    engine.telemetry.learn = lambda *one: (log.append("learn"), learn(*one))[1]  # type: ignore[method-assign]
    engine.scheduler.commit = lambda *one: (log.append("commit"), commit(*one))[1]  # type: ignore[method-assign]
    process.serve(engine, script)  # type: ignore[arg-type]
    assert log == ["commit", "learn"] * (len(log) // 2)
    assert len(log) > 4
