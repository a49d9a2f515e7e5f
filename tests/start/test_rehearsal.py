"""Synthetic requests are served at start, and leave nothing but what is known of the steps'
times.
"""

from __future__ import annotations

import pytest

from engine.control.controller import Controller
from engine.control.host_time import HostTime
from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.request import Speculation
from engine.start.calibration import measure_points
from engine.start.rehearsal import rehearse
from engine.step.engine import Engine
from tests.engine import tiny
from tests.wrong import calls_of

ADAPTIVE = Speculation(rule="bv_race", num_drafts=3, draft_length=3, adaptive=True)


@pytest.fixture
def engine() -> Engine:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4)
    engine.scheduler.times = times = StepTimes(measure_points(engine, ADAPTIVE))
    engine.scheduler.controller = Controller(times, 5)
    return engine


def test_the_first_request_is_compared_with_plain_steps_as_they_are_served(engine: Engine) -> None:
    times = engine.scheduler.times
    assert times is not None
    work = StepWork(rows=1, text=3)
    assert times.host.usual_s(work) == 0  # measured steps have neither planning nor messages
    rehearse(engine, ADAPTIVE)
    usual_s = times.host.usual_s(work)
    assert usual_s > 0
    engine.submit(tiny.request("0", [1, 2, 3], Speculation(), max_tokens=9))
    expected_s = float(times.step_s([work])[0])
    assert expected_s > usual_s
    assert engine.run_step().stats.usual_plain_s == expected_s


def test_a_rehearsal_serves_plain_steps_too(engine: Engine) -> None:
    """Otherwise the host time of steps that draft would be taken for that of plain ones."""
    with calls_of(HostTime, "observe") as calls:
        rehearse(engine, ADAPTIVE)
    assert all(seconds > 0 for (_, _, seconds), _ in calls)
    assert {(work.num_drafting > 0, work.prompt > 0) for (_, work, _), _ in calls} >= {(True, False), (False, False)}


def test_a_rehearsal_takes_the_steps_that_serve(engine: Engine) -> None:
    with calls_of(engine.unrecorded, "verify") as calls:
        rehearse(engine, ADAPTIVE)
    assert calls, "a compiled step, not the specification"


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


def test_no_prefix_computed_before_a_rehearsal_is_used_after_it(engine: Engine) -> None:
    """A self-check computes texts before; the rehearsal writes over their K/V."""
    prompt = tiny.prompts(101, [40])[0]
    plain = {"speculation": Speculation(), "max_tokens": 12}
    first = tiny.run(engine, [tiny.request("0", prompt, **plain)]).tokens["0"]
    rehearse(engine, ADAPTIVE)
    assert tiny.run(engine, [tiny.request("1", prompt, **plain)]).tokens["1"] == first
    assert engine.stats().num_cache_hits == 0


def test_an_engine_of_a_short_context_rehearses(engine: Engine) -> None:
    short = tiny.build(tiny.llama(seed=1), None, max_num_seqs=1, max_model_len=16)
    rehearse(short, Speculation())
    assert short.scheduler.times is None
