"""The speedup that steps report, on a simulated clock: the time of plain decoding is known, not measured.

Drafting steps take longer around their parts than plain ones do, and the draft model reads prompts, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine.control import host_time
from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation
from engine.scheduling.sequence import Sequence
from engine.step.telemetry import Telemetry
from tests.engine import tiny
from tests.scheduling.machine import Machine, sequence
from tests.server.test_statistics import outcome

MACHINE = Machine(read_s=0.0002, prompt_s=0.0003)
HOST_S, DRAFTING_HOST_S = 0.0015, 0.0024
"""A tenth of a plain step and more, as with the embedded pair."""
EMITTED = (1, 4, 2, 3, 2)
CHUNK = 100


class Served:
    """Steps of a request, or of several, on a clock that the machine above moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("engine.step.telemetry.time", SimpleNamespace(perf_counter=lambda: self.now))
        self.reader = sequence(99)
        self.scheduler: Any = SimpleNamespace(
            times=StepTimes(MACHINE.points()),
            controller=None,
            has_work=True,
            running=lambda _: self.reader,
            last_plan=Plan(()),
            num_running=1,
            num_waiting=0,
            blocks=SimpleNamespace(num_used=0),
            num_preemptions=0,
            num_cache_queries=0,
            num_cache_hits=0,
        )
        self.telemetry = Telemetry(self.scheduler, SimpleNamespace(type="cpu"))  # type: ignore[arg-type]
        self.plain_s = self.taken_s = self.reported_s = self.told_s = 0.0

    def step(self, rows: list[Row], num_tokens: int = 1, counted: bool = False) -> None:
        """Carry out a step in which every row that emits gets this many tokens; the last row is counted."""
        self.scheduler.last_plan = plan = Plan(tuple(rows))
        work = StepWork.of(plan)
        draft_s, rest_s = MACHINE.parts_s(work)
        host_s = DRAFTING_HOST_S if work.drafting else HOST_S
        began = self.now
        self.telemetry.begin_step()
        self.now += host_s / 4  # planning
        with self.telemetry.phase("parts"):
            with self.telemetry.phase("draft"):
                self.now += draft_s
            with self.telemetry.phase("target"):
                self.now += rest_s
        self.now += host_s / 4
        stats = self.telemetry.end_step(0)
        self.now += host_s / 2  # messages
        if counted:
            self.taken_s += self.now - began
            # The same prompt tokens and the first token of each row in one step, the other tokens in further ones.
            alone = replace(work.plain, prompt=work.prompt, prompt_text=work.prompt_text)
            further_s = (num_tokens - 1) * (MACHINE.step_s(work.plain) + HOST_S)
            self.plain_s += MACHINE.step_s(alone) + HOST_S + (further_s if work.rows else 0.0)
        if rows[-1].emits:
            emitted = replace(outcome(num_tokens, num_tokens - 1), reading_s=self.reader.take_reading())
            times_s = stats.times_of(emitted)
            assert times_s is not None
            if counted:
                self.reported_s += times_s[0]
                self.told_s += times_s[1]

    @property
    def error(self) -> float:
        """Return reported / true speedup - 1."""
        return self.reported_s / self.told_s / (self.plain_s / self.taken_s) - 1


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


def decode(served: Served, number: int = 1) -> None:
    """Serve a few plain steps, and then drafts for this many requests."""
    for _ in range(64):
        served.step([row(9)])
    for count in range(300):
        served.step([row(9, (1, 1, 1))] * number, EMITTED[count % 5], counted=count >= 100)


@pytest.mark.parametrize("number", [1, 4, 16])
def test_drafts_that_never_stop_report_the_speedup(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    served = Served(monkeypatch)
    decode(served, number)
    assert abs(served.error) < 0.01


def test_the_host_time_of_drafting_steps_is_not_plain_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for it, answers report 6 % too much; so they did."""
    monkeypatch.setattr(host_time, "_slopes", lambda _: np.array([1.0, 0.0]))
    served = Served(monkeypatch)
    decode(served)
    assert served.error > 0.05


def read_a_prompt(served: Served, others: int) -> None:
    """Read a prompt in four steps, while others decode, and draft in the last of them."""
    decode(served)
    served.plain_s = served.taken_s = served.reported_s = served.told_s = 0.0
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
    assert served.told_s == pytest.approx(served.taken_s)
    assert served.told_s > served.plain_s, "here the draft model's reading takes longer than its drafts save"


def test_without_the_steps_before_the_first_token_too_much_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sequence, "take_reading", lambda _: (0.0, 0.0))
    served = Served(monkeypatch)
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
