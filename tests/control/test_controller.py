"""The controller on simulated machines, for any load.

It is never slower than plain decoding, and near the best shape.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count, groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control import controller
from engine.control.arms import Bucket
from engine.control.controller import Controller, menu
from engine.control.step_time import PlainTimes, StepTimes
from engine.control.step_work import PLAIN, Shape
from engine.fanout import Fanout, chains
from tests.scheduling.machine import ASKING, H100, Machine, Server, asking
from tests.wrong import instead

CPU = Machine(
    base_s=0.00145,
    row_s=0.00015,
    node_s=0.00015,
    pass_s=0.0002,
    draw_s=2e-5,
    prompt_s=0.00012,
    read_s=2e-5,
    noise=0.1,
)
"""About the embedded pair on one core."""
DEVICE = replace(H100, noise=0.03)
FIXED: tuple[Shape, ...] = (PLAIN, (1, 1), (1, 3), (1, 5), (2, 3))


def mostly(drafts: list[Fanout]) -> Fanout:
    return Counter(drafts).most_common(1)[0][0]


# -- never slower, and near the best ---------------------------------------------------------------

Cell = tuple[Machine, float, int, int, int]
"""Machine, acceptance, requests, tokens of prompts and of answers."""
CELLS: list[Cell] = [
    *((CPU, acceptance, number, 20, 48) for acceptance in (0.75, 0.6, 0.45, 0.0) for number in (1, 4, 16, 64)),
    *((CPU, 0.4, number, 1024, 48) for number in (1, 4, 16)),
    *((DEVICE, 0.75, number, 300, 64) for number in (1, 4, 16, 64)),
]


def rate_of(cell: Cell, fixed: Shape | None, num_steps: int, num_before: int = 50) -> float:
    """Tokens per second of a shape, or of those that the controller chooses."""
    machine, *load = cell
    server = Server(replace(machine), *load, fixed=fixed)
    server.run(num_before)
    return server.rate(num_steps)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param((CPU, 0.75, 1, 20, 48), id="one request"),
        pytest.param((CPU, 0.0, 4, 20, 48), id="useless drafts"),
        pytest.param((DEVICE, 0.75, 16, 300, 64), id="a device with prompts"),
    ],
)
def test_adaptive_drafts_are_never_slower_than_plain_decoding(cell: Cell) -> None:
    assert rate_of(cell, None, 1200, num_before=300) > 0.98 * rate_of(cell, PLAIN, 600)


@pytest.mark.slow
def test_adaptive_drafts_are_near_the_best_fixed_shape_in_the_mean() -> None:
    over_best = []
    for cell in CELLS:
        machine, *load = cell
        servers = [Server(replace(machine), *load, fixed=shape) for shape in (*FIXED, None)]
        servers[-1].run(500)
        *rates, rate = [server.rate_of_answers(3000 * server.num_requests) for server in servers]
        assert rate > 0.98 * rates[0], cell
        over_best.append(rate / max(rates))
    assert statistics.mean(over_best) > 0.979


@pytest.mark.parametrize("slow", [3.0, 1.3])
def test_drafts_that_take_longer_than_guessed_cost_little(slow: float) -> None:
    machine = Machine(noise=0.05, node_s=0.004)
    server = Server(machine, 0.5)
    machine.drafting_times = slow
    server.run(300)
    assert server.rate(2000) > 0.98 / (machine.base_s + machine.row_s)


def test_many_requests_draft_less_than_few() -> None:
    """On a ramp from one request to 64 and back."""
    server = Server(replace(CPU), 0.75)
    nodes = []
    for server.num_requests in (1, 4, 64, 4, 1):
        server.run(120)
        nodes.append(sum(server.step().nodes / server.num_requests for _ in range(60)) / 60)
    assert nodes[0] > 1.5
    assert nodes[2] < 0.5
    assert nodes[4] > 1


@pytest.mark.parametrize("compares_neighbours", [True, False])
def test_a_machine_whose_speed_changes_keeps_its_best_shape(compares_neighbours: bool) -> None:
    """All steps take three times as long from some time on.

    The wrong variant compares with plain steps as they were at first.
    """

    def as_at_first(observe: Callable[..., None], bucket: Bucket, drafts: Fanout, load: float, *more: float) -> None:
        observe(bucket, drafts, load if drafts else load / machine.times, *more)

    machine = Machine(noise=0.05)
    server = Server(machine, 0.8)
    server.run(300)
    machine.times = 3.0
    with contextlib.nullcontext() if compares_neighbours else instead(Bucket, "observe", as_at_first):
        server.run(3000)
        assert bool(mostly(server.run(200))) == compares_neighbours


# -- what is tried ---------------------------------------------------------------------------------


def test_a_fresh_start_drafts_at_once_and_soon_tries_plain_steps() -> None:
    drafts = Server(Machine(noise=0.05), 0.8).run(100)
    assert all(drafts[:12])
    assert drafts.count(()) >= 8, "plain steps say what speedup is reported"


@pytest.mark.parametrize("tries", [True, False])
def test_plain_steps_show_that_drafts_are_a_loss(tries: bool) -> None:
    """Guessed as a gain, they take twice as long. The wrong variant trusts the guess."""
    machine = Machine(noise=0.05, node_s=0.003)
    server = Server(machine, 0.6)
    machine.drafting_times = 2.0
    with contextlib.nullcontext() if tries else instead(Controller, "_trial", lambda *asked: asked[2]):
        server.run(300)
        assert (mostly(server.run(100)) == ()) == tries


@pytest.mark.parametrize("longest", [controller._LONGEST_TRIAL, 1])
def test_drafts_are_found_though_half_of_the_steps_say_nothing(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessed as a loss, they pay. The wrong variant ends trials by their steps alone."""
    numbers = count()

    def every_other(observe: Callable[..., PlainTimes], *operands: Any) -> PlainTimes:
        return observe(*operands, between_s=0.0 if next(numbers) % 2 else None)

    monkeypatch.setattr(controller, "_LONGEST_TRIAL", longest)
    machine = Machine(noise=0.05, pass_s=0.008)
    server = Server(machine, 0.8)
    machine.pass_s = 0.001
    with instead(StepTimes, "observe", every_other):
        server.run(600)
        assert (mostly(server.run(200)) != ()) == (longest > 1)


def test_trials_are_few_and_short() -> None:
    drafts = Server(Machine(noise=0.05), 0.8).run(4000)
    usual = mostly(drafts)
    assert 0 < sum(one != usual for one in drafts[1000:]) < 3000 / 8
    assert max(len(list(run)) for one, run in groupby(drafts[100:]) if one == ()) <= 40


def test_a_useless_drafter_is_given_up_soon() -> None:
    server = Server(Machine(noise=0.05, node_s=0.002), 0.0)
    server.run(40)
    assert mostly(server.run(100)) == ()
    assert not server.controller.reads
    assert sum(map(bool, server.run(2000))) < 200


def test_choices_hold_for_blocks_of_steps_across_requests() -> None:
    """Answers are shorter than a block here; the lengths of all runs of equal steps are not."""
    server = Server(Machine(noise=0.05), 0.8, num_prompt=5, num_answer=8)
    server.run(40)
    fanouts = []
    for _ in range(300):
        with_prompts = server.step().prompt > 0
        if not with_prompts:
            fanouts.append(server.controller.shape)
    runs = [len(list(run)) for _, run in groupby(fanouts)]
    assert min(runs[1:-1], default=8) >= 8


# -- what a choice depends on ----------------------------------------------------------------------


def controller_of(**costs: float) -> Controller:
    return Controller(StepTimes(Machine(**costs).prices()), 16)


FREE = {"node_s": 1e-6, "row_s": 1e-6, "pass_s": 1e-5}
DEAR = {"node_s": 0.05, "row_s": 0.05, "pass_s": 0.01}


def test_free_nodes_are_drafted_and_dear_ones_are_not() -> None:
    for costs, drafts in ((FREE, True), (DEAR, False)):
        controller = controller_of(**costs)
        controller.choose([ASKING])
        assert (controller.shape != PLAIN) == drafts == bool(controller.fanout(ASKING))
        assert controller.reads == drafts


def test_reading_the_prompts_is_a_part_of_what_drafting_costs() -> None:
    """Enough is gained for long answers, but not if long prompts have to be read for each."""
    for num_prompt, num_emitted, drafts in ((0, 20, True), (400, 20, False), (400, 4000, True)):
        controller = controller_of(row_s=0.004, read_s=0.0003)
        assert controller.reads, "nothing is known yet"
        for _ in range(40):
            controller.acceptance.note_answer(num_prompt, num_emitted)
        controller.choose([ASKING])
        assert (controller.shape != PLAIN) == drafts == controller.reads


def test_cheaper_drafts_are_better_whatever_prompts_take() -> None:
    """Drafts may seem to take less time than plain decoding, by chance."""
    controller = controller_of(**FREE)
    bucket = controller.times.bucket(1, with_prompts=True)
    bucket.prompt = 3.5
    arm = bucket.add(chains(1, 3))
    arm.is_compared = True
    values = []
    for arm.cost in (1.2, 1.0, 0.9, 0.7, 0.5):
        values.append(controller._value((1, 3), bucket, 1, ()))
    assert values == sorted(values)


def test_neighbours_that_wait_longer_count() -> None:
    """Drafts take as long as half a step: too much if three others get one token in it."""
    for others, drafts in (([], True), ([()] * 3, False)):
        controller = controller_of(base_s=0.006, row_s=0.003, pass_s=0.001)
        controller.choose([asking(1, 1)], others)
        assert (controller.shape != PLAIN) == drafts


def test_shapes_stay_within_the_requests_own_limits() -> None:
    controller = controller_of(**FREE)
    one_chain, many = asking(1), ASKING
    controller.choose([one_chain, many])
    assert controller.fanout(one_chain)[0] == 1
    assert controller.fanout(many)[0] > 1


@given(num_drafts=st.integers(1, 16), draft_length=st.integers(1, 16))
def test_the_menu_never_drafts_more_nodes_than_asked(num_drafts: int, draft_length: int) -> None:
    shapes = menu(num_drafts, draft_length, 16)
    assert (num_drafts, draft_length) in shapes
    assert all(k <= num_drafts and k * n <= num_drafts * draft_length for k, n in shapes)
