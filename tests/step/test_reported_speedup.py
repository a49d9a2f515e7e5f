"""The speedup that steps report, on a simulated clock: the time of plain decoding is known, not
measured.

Drafting steps take longer around their parts than plain ones do, and the draft model reads prompts,
too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.control import host_time
from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation
from engine.scheduling.outcome import Timing
from engine.scheduling.sequence import Sequence
from engine.step.results import BROKEN
from engine.step.telemetry import Pace, Telemetry
from tests.engine import tiny
from tests.scheduling.machine import Machine, sequence
from tests.server.step_results import outcome
from tests.wrong import instead

MACHINE = Machine(read_s=0.0002, prompt_s=0.0003)
HOST_S, DRAFTING_HOST_S = 0.0015, 0.0024
"""A tenth of a plain step and more, as with the embedded pair."""
EMITTED = (1, 4, 2, 3, 2)
CHUNK = 100
STALL_S = 0.03
"""Three plain steps."""


class Served:
    """Steps of a request, or of several, on a clock that the machine above moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mean_s: float = 0.0, machine: Machine = MACHINE) -> None:
        """mean_s: seconds of work after which another process runs; 0 is none."""
        self.now, self.worked_s, self.mean_s, self.machine = 0.0, 0.0, mean_s, machine
        monkeypatch.setattr("engine.step.telemetry.time", SimpleNamespace(perf_counter=lambda: self.now))
        self.reader, other = sequence(0), sequence(1)
        self.scheduler: Any = SimpleNamespace(
            times=StepTimes(machine.points()),
            controller=None,
            has_work=True,
            running=[self.reader, other].__getitem__,
            last_plan=Plan(()),
            num_running=1,
            num_waiting=0,
            tables=SimpleNamespace(target=SimpleNamespace(num_used=0)),
            num_preemptions=0,
            num_cache_queries=0,
            num_cache_hits=0,
        )
        self.telemetry = Telemetry(self.scheduler, SimpleNamespace(type="cpu"))  # type: ignore[arg-type]
        self.forget()

    def stall_s(self, began: float) -> float:
        """Return the time that another process takes from this step: as much for every second of
        work.
        """
        if not self.mean_s:
            return 0.0
        before, self.worked_s = self.worked_s, self.worked_s + self.now - began
        return STALL_S * (self.worked_s // self.mean_s - before // self.mean_s)

    def step(self, rows: list[Row], num_tokens: int = 1, counted: bool = False) -> None:
        """Carry out a step in which every row that emits gets this many tokens; the last row is
        counted.
        """
        self.scheduler.last_plan = plan = Plan(tuple(rows))
        work = StepWork.of(plan)
        draft_s, rest_s = self.machine.parts_s(work)
        host_s = DRAFTING_HOST_S if work.num_drafting else HOST_S
        began = self.now
        self.telemetry.stopwatch.start()
        self.now += host_s / 4  # planning
        with self.telemetry.phase("parts"):
            with self.telemetry.phase("draft"):
                self.now += draft_s
            with self.telemetry.phase("target"):
                self.now += rest_s
        self.now += host_s / 4 + self.stall_s(began)
        stats = self.telemetry.learn(self.telemetry.end_step(0))
        self.now += host_s / 2  # messages
        if counted:
            self.taken_s += self.now - began
            # The same prompt tokens and the first token of each row in one step, the other tokens
            # in further ones.
            further_s = (num_tokens - 1) * (self.machine.step_s(work.plain) + HOST_S)
            alone = replace(work.plain, prompt=work.prompt, prompt_text=work.prompt_text)
            plain_s = self.machine.step_s(alone) + HOST_S + (further_s if work.rows else 0.0)
            self.plain_s += plain_s * (1 + STALL_S / self.mean_s if self.mean_s else 1.0)
        if rows[-1].emits:
            emitted = replace(outcome(num_tokens, num_tokens - 1), reading_s=self.reader.take_reading())
            if counted:
                self.timing.add(stats, emitted)

    @property
    def error(self) -> float:
        """Return reported / true speedup - 1."""
        assert self.timing.speedup is not None
        return self.timing.speedup / (self.plain_s / self.taken_s) - 1

    def forget(self) -> None:
        """Begin to count."""
        self.plain_s = self.taken_s = 0.0
        self.timing = Timing()


def row(first: int, fanout: tuple[int, ...] = (), known: int = 1, read: int = 1, emits: bool = True) -> Row:
    return Row(
        sequence_id=0,
        input_ids=(0,) * known,
        first_index=first,
        draft_input_ids=(0,) * read if fanout or not emits else (),
        draft_first_index=first,
        block_ids=(0,),
        emits=emits,
        sampling=Sampling(),
        speculation=Speculation(),
        fanout=fanout,
    )


def decode(served: Served, number: int = 1, num_steps: int = 300) -> None:
    """Serve a few plain steps, and then drafts for this many requests."""
    for _ in range(64):
        served.step([row(9)])
    for count in range(num_steps):
        served.step([row(9, (1, 1, 1))] * number, EMITTED[count % 5], counted=count >= 100)


@pytest.mark.parametrize("number", [1, 4, 16])
def test_drafts_that_never_stop_report_the_speedup(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    served = Served(monkeypatch)
    decode(served, number)
    assert abs(served.error) < 0.01


def test_the_host_time_of_drafting_steps_is_not_plain_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for it, answers report 6 % too much; so they did."""
    served = Served(monkeypatch)
    with instead(host_time, "_slopes", lambda *_: np.array([1.0, 0.0])):
        decode(served)
    assert served.error > 0.05


@pytest.mark.slow
def test_stalls_would_have_delayed_plain_decoding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of step times takes them for exceptions, so plain steps alone, as it predicts them,
    are too short.
    """
    served = Served(monkeypatch, mean_s=0.1)
    decode(served, num_steps=3000)
    assert abs(served.error) < 0.03
    served = Served(monkeypatch, mean_s=0.1)
    with instead(Pace, "load", lambda *_: 1.0):
        decode(served, num_steps=3000)
    assert served.error < -0.2


def read_a_prompt(served: Served, others: int) -> None:
    """Read a prompt in four steps, while others decode, and draft in the last of them."""
    decode(served)
    served.forget()
    decoding = [row(9)] * others
    for number in range(3):
        served.step([*decoding, row(number * CHUNK, known=CHUNK, read=CHUNK, emits=False)], counted=True)
    served.step([*decoding, row(3 * CHUNK, (1, 1, 1), known=CHUNK, read=CHUNK)], 3, counted=True)


@pytest.mark.parametrize("others", [0, 2])
def test_a_prompt_that_is_read_in_parts_counts(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """The request gets no token in three of the steps, in which the draft model reads, too."""
    served = Served(monkeypatch)
    read_a_prompt(served, others)
    assert abs(served.error) < 0.02
    assert served.timing.wall_s == pytest.approx(served.taken_s)
    assert served.timing.wall_s > served.plain_s, "here the draft model's reading takes longer than its drafts save"


def read_prompts_of_others(served: Served) -> None:
    """Draft for eight requests, in steps that read prompts of others."""
    decode(served, 8)
    served.forget()
    reading = replace(row(0, known=64, read=0, emits=False), sequence_id=1)
    for _ in range(40):
        served.step([reading] + [row(9, (1, 1, 1, 1, 1))] * 8, 2, counted=True)


def test_prompts_count_as_they_would_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 64 tokens of a pass are free here. Drafts use most of them up, and plain decoding
    would not.
    """
    served = Served(monkeypatch, machine=Machine(free_tokens=64))
    read_prompts_of_others(served)
    assert abs(served.error) < 0.03
    served = Served(monkeypatch, machine=Machine(free_tokens=64))
    with instead(StepWork, "without_drafts", lambda _, work: work):
        read_prompts_of_others(served)
    assert served.error > 0.5, "a prompt after drafts is not one after plain rows"


def test_without_the_steps_before_the_first_token_too_much_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch)
    with instead(Sequence, "take_reading", lambda *_: (0.0, 0.0)):
        read_a_prompt(served, 2)
    assert served.error > 0.1


def test_an_engine_hands_over_the_steps_before_the_first_token() -> None:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02), budget=32)
    engine.scheduler.times = StepTimes(MACHINE.points())
    block = Speculation(rule="block", num_drafts=1, draft_length=2)
    engine.submit(tiny.request("0", tiny.prompts(101, [70])[0], block, max_tokens=9))
    steps = []
    while not (step := engine.run_step()).outcomes:
        steps.append(step.stats)
    assert len(steps) == 2
    (first,) = step.outcomes
    taken_s, plain_s = first.reading_s
    assert taken_s == pytest.approx(sum(stats.wall_s for stats in steps))
    assert plain_s == pytest.approx(sum(stats.wall_s - stats.phases_s["draft"] for stats in steps))
    assert engine.run_step().outcomes[0].reading_s == (0, 0)


def test_a_request_may_fail_while_its_prompt_is_read() -> None:
    """Its grammar's process may be killed in any step; the others of the step go on."""
    engine = tiny.build(tiny.llama(seed=1), None, budget=32)
    engine.scheduler.times = StepTimes(MACHINE.points())
    engine.submit(*[tiny.request(name, tiny.prompts(101, [length])[0]) for name, length in (("0", 9), ("1", 70))])
    with instead(engine.grammar_queue, "failed", lambda *_: [("1", BROKEN)]):
        step = engine.run_step()
    assert [outcome.request_id for outcome in step.outcomes] == ["0"]
    assert step.failed == [("1", BROKEN)]
    assert step.stats.num_running == 1


STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from([1, 3, CHUNK]), st.floats(0.0, 0.1)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, times=st.sampled_from([0.02, 1.0, 20.0]), free_tokens=st.sampled_from([0, 64]))
def test_no_load_and_no_machine_claims_a_gain(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[bool, int, float]], times: float, free_tokens: int
) -> None:
    """Steps that drafted, or not, with prompts or without, took any time on a machine that is not
    what calibration saw, and no draft was accepted. A time is never negative.
    """
    served = Served(monkeypatch, machine=Machine(read_s=0.0002, prompt_s=0.0003, free_tokens=free_tokens))
    served.machine.times = times
    for drafts, known, delay_s in steps:
        with instead(Served, "stall_s", lambda *_, delay_s=delay_s: delay_s):
            served.step([row(9, (1, 1, 1) if drafts else (), known)], 1, counted=True)
    assert served.timing.speedup is not None
    assert 0 < served.timing.speedup <= 1 + 1e-9


class FirstTokensCost(Machine):
    """A machine on which the first four tokens of a pass take a millisecond each, and all others
    almost no time.
    """

    delay_s = 0.0

    def parts_s(self, work: StepWork) -> tuple[float, float]:
        draft_s, _ = super().parts_s(work)
        num_tokens = work.rows + work.nodes + work.prompt
        return draft_s, 0.009 + 0.001 * min(4, num_tokens) + 1e-6 * num_tokens + self.delay_s


def test_what_delays_a_step_with_few_prompt_tokens_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt tokens take almost no time next to drafts here; alone they do. The ratio of the two
    times would multiply whatever else delayed the step by a thousand.
    """
    machine = FirstTokensCost()
    served = Served(monkeypatch, machine=machine)
    decode(served)
    served.forget()
    machine.delay_s = 0.001
    served.step([row(9, (1, 1, 1), known=4)], 3, counted=True)
    assert served.timing.prompt_s < 0.006, "three tokens of 1 ms each, and a delay of 1 ms"


def test_the_load_of_earlier_steps_would_claim_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant compares with plain steps as long as those of another load, which has
    ended.
    """
    found = []
    for is_wrong in (False, True):
        served = Served(monkeypatch)
        with instead(Served, "stall_s", lambda *_: 0.02):
            for _ in range(90):
                served.step([row(9)])
        earlier = served.telemetry._pace.ratio
        for _ in range(5):
            served.step([row(9)], counted=True)
        timing = served.timing
        found.append(earlier * timing.usual_tokens_s / timing.wall_s if is_wrong else timing.speedup or 0.0)
    assert found[0] <= 1
    assert found[1] > 1.1
