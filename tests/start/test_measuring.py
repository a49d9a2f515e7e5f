"""Measured steps of synthetic plans: they disturb nothing, and take turns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from engine.plan import Plan
from engine.request import Speculation
from engine.start import measuring
from engine.start.measuring import measure_prices, middle_steps, synthetic_plan
from engine.step.engine import Engine
from tests.engine import tiny
from tests.wrong import calls_of, instead

DRAFTS = Speculation(rule="bv_race", num_drafts=3, draft_length=3, adaptive=True)


def built(**more: Any) -> Engine:
    target = tiny.llama(seed=1)
    return tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4, **more)


@pytest.mark.parametrize("budget", [2048, 32])
def test_measured_steps_fit_the_pool_and_disturb_nothing(budget: int) -> None:
    engine = built(budget=budget)
    text = tiny.prompts(101, [20])[0]
    request = tiny.request("0", text, Speculation(rule="bv_race", num_drafts=3, draft_length=3), temperature=1.0)
    before = tiny.run(built(), [request]).tokens
    prices = measure_prices(engine, DRAFTS)
    assert prices.step_s > 0
    assert min(prices.row_s, prices.pass_s, prices.draw_s, prices.read_s) >= 0
    assert measure_prices(engine, Speculation()).read_s == 0
    engine.scheduler.check_invariants()
    assert tiny.run(engine, [request]).tokens == before


def test_a_model_whose_steps_are_long_is_measured_for_a_short_time() -> None:
    """The wrong variant measures all plans."""
    engine = built()
    with calls_of(measuring, "_turn") as calls, instead(measuring, "_is_over", lambda *_: True):
        prices = measure_prices(engine, DRAFTS)
    assert len(calls) == 1
    assert prices.pass_s > 0, "a guess"
    with calls_of(measuring, "_turn") as calls, instead(measuring, "_is_over", lambda *_: False):
        measure_prices(engine, DRAFTS)
    assert len(calls) == 12


def test_plans_are_measured_in_turns() -> None:
    """Other load on the machine affects all of them."""
    engine = built()
    plans = [synthetic_plan(engine, rows, 8) for rows in (1, 2)]
    seen: list[Plan] = []
    with instead(engine, "carry_out", lambda right, plan: (seen.append(plan), right(plan))):
        middle_steps(engine, plans)
    changes = sum(before is not after for before, after in pairwise(seen))
    assert changes >= 3
