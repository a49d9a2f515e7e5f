"""Synthetic requests are served at start, and leave nothing but what is known of the steps' times."""

from __future__ import annotations

import pytest

from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.request import Speculation
from engine.step.calibration import measure_points
from engine.step.engine import Engine
from engine.step.rehearsal import rehearse
from tests.engine import tiny

ADAPTIVE = Speculation(rule="bv_race", num_drafts=3, draft_length=3, adaptive=True)


@pytest.fixture
def engine() -> Engine:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4)
    engine.scheduler.times = times = StepTimes(measure_points(engine, ADAPTIVE))
    engine.scheduler.controller = Controller(times, 5)
    return engine


def first_step(engine: Engine) -> tuple[float, float]:
    """Plain time that the first step reports, and what of it is outside the passes."""
    engine.submit(tiny.request("0", [1, 2, 3], Speculation(), max_tokens=9))
    plain_s = engine.run_step().stats.plain_s
    times = engine.scheduler.times
    assert plain_s is not None
    assert times is not None
    return plain_s, times.host_s


def test_the_first_request_is_compared_with_plain_steps_as_they_are_served(engine: Engine) -> None:
    times = engine.scheduler.times
    assert times is not None
    assert times.host_s == 0  # measured steps have neither planning nor messages
    rehearse(engine, ADAPTIVE)
    usual_s = times.host_s
    assert usual_s > 0
    plain_s, host_s = first_step(engine)
    assert plain_s > host_s
    assert host_s == pytest.approx(usual_s, rel=0.2)  # one step changes it by at most 3 * 5 %


def test_a_rehearsal_leaves_no_request_and_no_text(engine: Engine) -> None:
    before = engine.stats()
    assert engine.scheduler.controller is not None
    spent_s = engine.scheduler.controller.spent_s
    rehearse(engine, ADAPTIVE)
    assert engine.stats() == before
    assert engine.scheduler.controller.spent_s == spent_s == 0
    assert not engine.scheduler.has_work
    engine.scheduler.check_invariants()


def test_answers_are_the_same_after_a_rehearsal(engine: Engine) -> None:
    target = tiny.llama(seed=1)
    fresh = tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4)
    requests = [
        tiny.request(str(i), prompt, Speculation(rule="block", num_drafts=1, draft_length=3), temperature=1.0)
        for i, prompt in enumerate(tiny.prompts(101, [20, 9, 33]))
    ]
    rehearse(engine, ADAPTIVE)
    assert tiny.run(engine, requests).tokens == tiny.run(fresh, requests).tokens


def test_an_engine_of_a_short_context_rehearses(engine: Engine) -> None:
    short = tiny.build(tiny.llama(seed=1), None, max_num_seqs=1, max_model_len=16)
    rehearse(short, Speculation())
    assert short.scheduler.times is None
