"""Synthetic requests are served at start, and leave only what is known of the steps' times."""

from __future__ import annotations

import pytest

from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.request import Speculation
from engine.scheduling.request_checks import with_fixed_shape
from engine.start.measuring import measure_prices
from engine.start.rehearsal import rehearse
from engine.step.engine import Engine
from tests.engine import tiny
from tests.wrong import calls_of

ADAPTIVE = Speculation(rule="bv_race", num_drafts=3, draft_length=3, adaptive=True)


@pytest.fixture
def engine() -> Engine:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4)
    engine.scheduler.times = times = StepTimes(measure_prices(engine, ADAPTIVE))
    engine.scheduler.controller = Controller(times, 5)
    return engine


def test_the_first_answer_can_report_a_speedup(engine: Engine) -> None:
    times = engine.scheduler.times
    assert times is not None
    assert not times.bucket(1).is_measured
    rehearse(engine, ADAPTIVE)
    assert times.bucket(1).is_measured
    fixed = with_fixed_shape(ADAPTIVE, engine.limits, engine.facts.device)
    engine.submit(tiny.request("0", [1, 2, 3], fixed, max_tokens=9))
    assert engine.run_step().stats.plain_s is not None


def test_a_rehearsal_takes_the_steps_that_serve(engine: Engine) -> None:
    with calls_of(engine.unrecorded, "verify") as calls:
        rehearse(engine, ADAPTIVE)
    assert calls, "a compiled step, not the specification"


def test_a_rehearsal_leaves_no_request_and_no_text(engine: Engine) -> None:
    before = engine.stats()
    rehearse(engine, ADAPTIVE)
    assert engine.stats() == before
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
