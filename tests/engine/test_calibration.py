"""Plain decoding is measured at start, and a step's stats say what a plain step would have taken."""

from __future__ import annotations

import pytest

from engine.calibration import measure_plain
from engine.metrics import PlainTimes
from engine.request import Speculation
from tests.engine import tiny


def test_times_are_interpolated_between_measured_points() -> None:
    times = PlainTimes((1, 4), (100, 200), ((1.0, 2.0), (4.0, 8.0)))
    assert times.step_s(1, 100) == 1.0
    assert times.step_s(1, 150) == pytest.approx(1.5)
    assert times.step_s(2, 200) == pytest.approx(4.0)
    assert times.step_s(1, 20) == 1.0
    assert times.step_s(7, 100) == pytest.approx(7.0), "beyond the last point the slope goes on"


def test_measured_grid_fits_the_pool_and_disturbs_nothing() -> None:
    target = tiny.llama(seed=1)
    draft = tiny.perturbed(target, 2, 0.02)
    engine = tiny.build(target, draft, max_num_seqs=4)
    text = tiny.prompts(101, [20])[0]
    request = tiny.request("0", text, Speculation(rule="bv_race", num_drafts=3, draft_length=3), temperature=1.0)
    before = tiny.run(tiny.build(target, draft, max_num_seqs=4), [request]).tokens
    engine.plain_times = measure_plain(engine)
    assert engine.plain_times.num_rows == (1, 2, 4)
    assert all(seconds > 0 for row in engine.plain_times.seconds for seconds in row)
    engine.scheduler.check_invariants()
    assert tiny.run(engine, [request]).tokens == before


def test_only_steps_without_prompts_are_compared() -> None:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, None)
    engine.plain_times = PlainTimes((1,), (1,), ((0.5,),))
    engine.submit(tiny.request("0", [1, 2, 3], max_tokens=3))
    known = [engine.run_step().stats.plain_s for _ in range(3)]
    assert known == [None, 0.5, 0.5]
