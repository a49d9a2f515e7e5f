"""Measured times of steps: the costs of drafts are ratios of neighbouring steps.

Plain times are unknown before plain steps were measured.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.control import arms
from engine.control.arms import COLD_STEPS
from engine.control.step_time import PlainTimes, StepTimes
from engine.control.step_work import MIXED, NO_DRAFTS, StepWork
from engine.fanout import Fanout
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation, TextDraft
from tests.scheduling.machine import Machine

CHAIN: Fanout = (1, 1, 1)


def row(number: int = 0, input_ids: int = 1, draft_input_ids: int = 0, first_index: int = 10, **more: object) -> Row:
    fields: dict[str, object] = {
        "sequence_id": number,
        "input_ids": (0,) * input_ids,
        "first_index": first_index,
        "draft_input_ids": (0,) * draft_input_ids,
        "draft_first_index": first_index,
        "block_ids": (),
        "emits": True,
        "sampling": Sampling(),
        "speculation": Speculation(),
        "fanout": (),
    }
    return Row(**(fields | more))  # type: ignore[arg-type]


class Served:
    """Steps on a machine, and the times that are measured of them."""

    def __init__(self, **costs: float) -> None:
        self.machine = Machine(**costs)
        self.times = StepTimes(self.machine.prices())
        self.between_s = 0.0
        """Seconds of messages in each step."""

    def step(self, drafts: Fanout = (), rows: int = 1, **more: Any) -> tuple[PlainTimes, float]:
        nodes = rows * sum(drafts) if drafts != MIXED else more.pop("nodes")
        work = StepWork(rows=rows, drafts=drafts, nodes=nodes, **more)
        draft_s, rest_s = self.machine.parts_s(work)
        seconds = draft_s + rest_s + self.between_s
        self.machine.now += seconds
        return self.times.observe(work, seconds, draft_s, self.machine.now, self.between_s), seconds

    def run(self, drafts: Fanout, num_steps: int = 30, rows: int = 1) -> PlainTimes:
        """Return the plain times of the last of these steps."""
        return [self.step(drafts, rows) for _ in range(num_steps)][-1][0]

    def plain_s(self, rows: int = 1) -> float:
        return self.machine.step_s(StepWork(rows=rows))


# -- what a step does ------------------------------------------------------------------------------


def test_the_work_of_a_plan_counts_what_every_pass_computes() -> None:
    plan = Plan(
        (
            row(0, draft_input_ids=2, fanout=(2, 1, 1)),
            row(1, draft_input_ids=1, fanout=(2, 1, 1)),
            row(2, draft_input_ids=1, fanout=(2,)),
            row(3, input_ids=30, draft_input_ids=30, first_index=100, emits=False),
            row(4, input_ids=5, draft_input_ids=5, first_index=0, fanout=(2, 1, 1)),
        )
    )
    assert StepWork.of(plan) == StepWork(
        rows=4,
        text=11 + 11 + 11 + 5,
        nodes=6 + 6 + 2 + 6,
        prompt=30 + 4,
        prompt_text=30 * (100 + 15) + 4 * 2,
        read=(2 + 1 + 1 + 30 + 5) - 4,
        drafts=(2, 1, 1),
    )
    assert StepWork.of(Plan((row(),))) == StepWork(rows=1, text=11)


@pytest.mark.parametrize(
    ("drafting", "drafts"),
    [
        (({"fanout": (2, 2)},), (2, 2)),
        (({"fanout": (3, 1)}, {}), MIXED),
        (({"fanout": (3, 1)},) * 3 + ({},), (3, 1)),
        (({"text_drafts": (TextDraft("lookup", (1, 2, 3)),)},), MIXED),
        (({}, {}), NO_DRAFTS),
    ],
)
def test_a_step_counts_as_what_nearly_all_of_its_rows_draft(
    drafting: tuple[dict[str, Any], ...], drafts: Fanout
) -> None:
    work = StepWork.of(Plan(tuple(row(number, **fields) for number, fields in enumerate(drafting))))
    assert work.drafts == drafts


# -- plain times -----------------------------------------------------------------------------------


def test_nothing_is_reported_before_plain_steps_were_measured() -> None:
    """In the steps of as many requests: others say nothing."""
    served = Served()
    assert served.run(CHAIN).plain_s is None
    served.run((), rows=4)
    served.machine.now += 100
    assert served.run(CHAIN).plain_s is None
    served.run(())
    assert served.run(CHAIN).plain_s == pytest.approx(served.plain_s(), rel=0.01)


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_plain_times_follow_the_speed_of_the_machine(rows: int) -> None:
    """It changes after the last plain step, without a further one."""
    served = Served(noise=0.03)
    served.run((), rows=rows)
    served.run(CHAIN, rows=rows)
    served.machine.times = 3.0
    reported = [served.step(CHAIN, rows)[0].plain_s or 0.0 for _ in range(200)]
    assert sum(reported) / 200 == pytest.approx(served.plain_s(rows), rel=0.06)


def test_short_runs_of_another_arm_say_nothing() -> None:
    """Each answer ends with a step without drafts, whose caches are cold.

    Here it takes five times as long.
    """
    served = Served()
    served.run(())
    for _ in range(40):
        served.run(CHAIN, 7)
        served.machine.times = 5.0
        served.step(())
        served.machine.times = 1.0
    assert served.run(CHAIN, 1).plain_s == pytest.approx(served.plain_s(), rel=0.01)


def test_a_block_that_ends_early_is_compared() -> None:
    """The ends of answers and requests that come take steps of it.

    Here steps are short, so a whole block has 32.
    """
    served = Served(base_s=1e-5, row_s=1e-6, node_s=1e-6, pass_s=1e-6)
    served.run(())
    served.run(CHAIN, COLD_STEPS + 10)
    served.run((), COLD_STEPS + 10)
    served.run(CHAIN, COLD_STEPS + 1)
    assert served.run(CHAIN, 1).plain_s == pytest.approx(served.plain_s(), rel=0.01)


def test_cold_steps_say_nothing() -> None:
    served = Served()
    served.run(CHAIN)
    served.machine.times = 2.0
    served.run((), COLD_STEPS)
    served.machine.times = 1.0
    served.run((), 20)
    assert served.run(CHAIN).plain_s == pytest.approx(served.plain_s(), rel=0.01)


@pytest.mark.parametrize("most", [arms._CHANGE, math.inf])
def test_a_process_that_takes_the_core_for_a_block_changes_little(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant believes every comparison."""
    monkeypatch.setattr(arms, "_CHANGE", most)
    served = Served()
    for times in (1.0, 1.0, 1.0, 3.0):
        served.machine.times = times
        served.run((), 12)
        served.machine.times = 1.0
        served.run(CHAIN, 30)
    is_right = served.run(CHAIN, 1).plain_s == pytest.approx(served.plain_s(), rel=0.1)
    assert is_right == (most < math.inf)


def test_a_step_that_was_delayed_delayed_plain_decoding_as_much() -> None:
    served = Served()
    served.run(())
    served.run(CHAIN)
    served.machine.times = 4.0
    plain, seconds = served.step(CHAIN)
    assert plain.plain_s == pytest.approx(served.plain_s(), rel=0.01)
    assert plain.usual_plain_s == pytest.approx(served.plain_s() / 4, rel=0.01)
    assert plain.plain_s is not None
    assert plain.plain_s < seconds


@pytest.mark.parametrize("reads", [True, False])
def test_prompts_count_on_both_sides_and_the_draft_models_reading_on_one(reads: bool) -> None:
    served = Served(read_s=0.0002)
    served.run(())
    served.run(CHAIN)
    plain, seconds = served.step(CHAIN, prompt=100, read=100 * reads)
    assert plain.prompt_s == pytest.approx(100 * 0.0003, rel=0.05)
    assert plain.plain_s == pytest.approx(served.plain_s(), rel=0.05)
    alone, seconds = served.step(rows=0, prompt=100, read=100 * reads)
    assert (alone.plain_s, alone.prompt_s) == (0, pytest.approx(seconds - 0.02 * reads))


def test_prompts_follow_the_speed_of_the_machine() -> None:
    """Also if no plain step reads one."""
    served = Served()
    served.run(())
    served.run(CHAIN)
    served.machine.times = 3.0
    served.run(CHAIN, 200)
    plain, _ = served.step(CHAIN, prompt=100)
    assert plain.prompt_s == pytest.approx(100 * 0.0009, rel=0.05)


def test_drafts_that_lengthen_prompts_gain_nothing_by_it() -> None:
    """On a device the passes of such a step are not recorded."""
    served = Served(launch_s=0.05)
    served.run(())
    served.run(CHAIN)
    plain, seconds = served.step(CHAIN, prompt=100)
    assert (plain.plain_s or 0) + plain.prompt_s == pytest.approx(served.plain_s() + 0.03, rel=0.05)
    assert seconds > 0.09


# -- prices ----------------------------------------------------------------------------------------


def test_prompts_are_priced_as_they_were_measured() -> None:
    served = Served()
    served.run((), 40)
    served.machine.prompt_s = 0.0009
    for _ in range(60):
        served.step(prompt=64)
        served.step()
    assert served.times.rest_s(StepWork(rows=1, prompt=64)) == pytest.approx(served.plain_s() + 64 * 0.0009, rel=0.1)


def test_text_drafts_are_priced_as_they_were_measured() -> None:
    served = Served()
    served.machine.node_s = 0.004
    for _ in range(300):
        served.run((), 8)
        served.step(MIXED, nodes=6)
    assert served.times.text_row_s() == pytest.approx(0.004, rel=0.2)


def test_an_arm_that_was_not_measured_costs_as_much_more_than_guessed_as_the_others() -> None:
    served = Served()
    bucket = served.times.bucket(1)
    guess = served.times.cost(bucket, (4, 1, 1), 1, 1)
    served.machine.drafting_times = 2.0
    served.run(())
    served.run(CHAIN)
    served.run(())
    assert served.times.cost(bucket, (4, 1, 1), 1, 1) > 1.5 * guess


def test_arms_that_were_compared_with_each_other_are_known_together() -> None:
    served = Served()
    for drafts in ((), CHAIN, (4, 1, 1)):
        served.run(drafts)
    bucket, now_s = served.times.bucket(1), served.machine.now
    print(bucket.variances(CHAIN, now_s), bucket.variances((), now_s), bucket.arms)
    assert bucket.variances(CHAIN, now_s)[(4, 1, 1)] < 0.7 * bucket.variances((), now_s)[(4, 1, 1)]
