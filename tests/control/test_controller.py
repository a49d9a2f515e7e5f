"""The controller on simulated machines: never slower than plain decoding, near the best shape, for
any load.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control import step_time
from engine.control.controller import Controller, ShapeChoice, menu
from engine.control.step_time import StepTimes
from engine.control.step_work import PLAIN, Shape
from tests.grid import grid
from tests.scheduling.machine import Machine, Server, rate_of, sequence
from tests.wrong import instead

FREE = {"node_s": 1e-6, "pass_s": 1e-5}
DEAR = {"node_s": 0.05, "pass_s": 0.01}
# Shapes differ little in what they give: drafting is a gain of a tenth.
SMALL_GAIN = {"node_s": 0.004}


def controller_of(**costs: object) -> Controller:
    return Controller(StepTimes(Machine(**costs).points()), 16)  # type: ignore[arg-type]


def mostly(shapes: list[Shape]) -> Shape:
    return Counter(shapes).most_common(1)[0][0]


# -- never slower, and near the best ---------------------------------------------------------------


COSTS: list[dict[str, float]] = [{}, SMALL_GAIN, {"node_s": 0.0002}, {"pass_s": 0.004}, DEAR]
ACCEPTANCES = (0.0, 0.3, 0.6, 0.9)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("costs", "acceptance", "num_requests"),
    grid(
        [(costs, acceptance, requests) for costs in COSTS for acceptance in ACCEPTANCES for requests in (1, 4, 16)],
        [(costs, acceptance, 4) for costs in COSTS for acceptance in (0.0, 0.9)] + [(SMALL_GAIN, 0.6, 4)],
    ),
)
def test_it_is_never_slower_than_plain_decoding_and_near_the_best_shape(
    costs: dict[str, float], acceptance: float, num_requests: int
) -> None:
    """Once it has seen some steps; trials among them, on a machine whose steps vary by a twentieth.

    Here more chains are accepted no better than one, which the controller does not believe at once.
    """
    accepted = dict.fromkeys(range(num_requests), acceptance)
    server = Server(Machine(noise=0.05, **costs), accepted)  # type: ignore[arg-type]
    server.run(400)
    rate = server.rate(1500)
    assert rate > 0.98 * rate_of(PLAIN, Machine(**costs), accepted)  # type: ignore[arg-type]
    best = max(rate_of(shape, Machine(**costs), accepted) for shape in menu(4, 5, 16))  # type: ignore[arg-type]
    assert rate > 0.9 * best


@pytest.mark.sampled
@pytest.mark.parametrize("slow", [3.0, 1.3])
def test_drafting_that_is_slower_than_measured_costs_little(slow: float) -> None:
    """Calibration met drafting when it was fast: it looked like a gain, and is a loss or little."""
    machine = Machine(noise=0.05, **SMALL_GAIN)
    server = Server(machine, {1: 0.5})
    machine.drafting_times = slow
    plain_rate = rate_of(PLAIN, Machine(**SMALL_GAIN), {1: 0.5})
    server.run(300)
    assert server.rate(4000) > 0.98 * plain_rate


def test_many_requests_draft_less_than_few() -> None:
    """Sixty-four requests fill the machine: further nodes are not worth their time. Then they
    leave, one by one.
    """
    machine = Machine(row_s=0.0002)
    server = Server(machine, dict.fromkeys(range(64), 0.7))
    everybody, nodes = server.sequences, []
    for num_requests in (1, 4, 64, 4, 1):
        server.sequences = everybody[:num_requests]
        server.run(64)
        drafted = [server.step() for _ in range(64)]
        nodes.append(sum(work.nodes / work.rows for work in drafted) / 64)
    assert nodes[0] > 1.5
    assert nodes[2] < 0.5
    assert nodes[0] == pytest.approx(nodes[4], rel=0.3)
    assert nodes[1] == pytest.approx(nodes[3], rel=0.3)


# -- what is tried ---------------------------------------------------------------------------------


def without_trials() -> contextlib.AbstractContextManager[Any]:
    return instead(Controller, "_next_trial", lambda *_: None)


@pytest.mark.parametrize("tries", [True, False])
def test_plain_steps_show_that_plain_decoding_is_faster_than_it_was(tries: bool) -> None:
    """All was measured on a busy machine, plain decoding most of all: speculation looked like a
    gain and is a loss.

    The wrong variant trusts what was measured, as nothing contradicts it while it drafts.
    """
    machine = Machine(shape_times={PLAIN: 2.0}, **SMALL_GAIN)
    server = Server(machine, {1: 0.5})
    machine.shape_times = {}
    machine.drafting_times = 1.3
    with contextlib.nullcontext() if tries else without_trials():
        server.run(1000)
        assert (mostly(server.run(400)) == PLAIN) == tries


@pytest.mark.slow
@pytest.mark.parametrize("tries", [True, False])
def test_a_shape_that_met_a_busy_machine_is_tried_again(tries: bool) -> None:
    """The wrong variant never tries another shape than the one it takes for the best."""
    machine = Machine()
    server = Server(machine, {1: 0.8})
    with contextlib.nullcontext() if tries else without_trials():
        best = mostly(server.run(100))
        machine.shape_times = {best: 1.25}
        assert mostly(server.run(300)[200:]) != best
        machine.shape_times = {best: 0.85}
        server.run(8000)
        assert (mostly(server.run(400)) == best) == tries


@pytest.mark.slow
def test_trials_are_few_and_short() -> None:
    server = Server(Machine(noise=0.05), {1: 0.8})
    shapes = server.run(4000)
    best = max(rate_of(shape, Machine(), {1: 0.8}) for shape in shapes)
    assert 0 < sum(rate_of(shape, Machine(), {1: 0.8}) < 0.9 * best for shape in shapes) < 4000 / 20
    plain = [len(list(run)) for shape, run in groupby(shapes) if shape == PLAIN]
    assert plain, "plain steps say what speedup is reported"
    assert plain[0] == 8, "the first trial"
    assert 8 + StepTimes.num_cold(0.011) <= max(plain) <= 8 + StepTimes.num_cold(0.009), (
        "later ones wait for the caches"
    )
    assert sum(plain) < 4000 / 32


@pytest.mark.slow
def test_a_trial_of_plain_steps_goes_on_while_requests_come_and_go() -> None:
    """Else the short answers of a lone client would end all of them before the caches are warm."""
    server = Server(Machine(), {1: 0.8})
    shapes = []
    for number in range(400):
        server.sequences = [sequence(number)]
        server.accepted = {number: 0.8}
        shapes += server.run(10)
    assert max(len(list(run)) for shape, run in groupby(shapes) if shape == PLAIN) > 20


def test_a_trial_of_plain_steps_ends_where_others_draft() -> None:
    """Such steps are not informative about plain ones; and a burst of requests need not wait for
    the caches.
    """
    for others, more in (([(1, 1)], []), ([], [sequence(1), sequence(2)])):
        server = Server(Machine(), {0: 0.8})
        while server.controller.choice.shape != PLAIN:
            server.step()
        server.controller.choose([*server.sequences, *more], others)
        assert server.controller.choice.shape != PLAIN


@pytest.mark.slow
def test_steps_without_adaptive_requests_are_no_trial() -> None:
    """The wrong variant counts them, and tries nothing for a long time afterwards."""
    server = Server(Machine(), {0: 0.8})
    while server.controller.choice.shape != PLAIN:
        server.step()
    for _ in range(1000):
        server.controller.choose([])
    assert server.run(3000).count(PLAIN) > 20


def test_no_plain_step_is_tried_beside_requests_that_draft_in_any_case() -> None:
    controller = controller_of()
    request = sequence(1)
    for _ in range(400):
        controller.choose([request], [(1, 1, 1)], other_text=1)
        assert controller.fanout(request)


# -- what it adapts to -----------------------------------------------------------------------------


def test_a_useless_drafter_is_given_up_soon_and_for_the_next_request_too() -> None:
    server = Server(Machine(node_s=0.002), {1: 0.0, 2: 0.0})
    everybody = server.sequences
    server.sequences = everybody[:1]
    first = server.run(64)
    assert first[0] != PLAIN, "it is never tried"
    assert sum(shape != PLAIN for shape in first) <= 24
    assert mostly(first[32:]) == PLAIN
    server.sequences = everybody[1:]
    assert sum(shape != PLAIN for shape in server.run(64)) <= 4


@pytest.mark.slow
def test_a_useful_one_is_kept_and_tried_again_after_a_long_while() -> None:
    server = Server(Machine(), {1: 0.9, 2: 0.0, 3: 0.9})
    everybody = server.sequences
    drafted = []
    for request, num_steps in zip(everybody, (100, 100, 3000), strict=True):
        server.sequences = [request]
        drafted.append(sum(shape != PLAIN for shape in server.run(num_steps)))
    assert drafted[0] > 80
    assert drafted[2] > 1000


@pytest.mark.sampled
@pytest.mark.parametrize(("times", "fewest", "most"), [(0.1, 2, 14), (1.0, 16, 28), (10.0, 40, 56)])
def test_choices_are_few_while_plain_decoding_is_the_best(times: float, fewest: int, most: int) -> None:
    """A choice takes time that plain decoding without a controller does not need; slow steps hide
    it.
    """
    server = Server(Machine(node_s=0.002, times=times), {1: 0.0})
    server.run(256)
    choices = {id(choice): choice for choice in _choices(server, 320)}
    assert fewest <= len(choices) <= most  # 1.6, 16 and 40, and trials
    server.accepted = {1: 0.9}
    server.run(1000)
    assert len({id(choice): choice for choice in _choices(server, 320)}) >= 40


def _choices(server: Server, num_steps: int) -> list[ShapeChoice]:
    """Return the choice of each step."""
    return [server.controller.choice for _ in range(num_steps) if server.step()]


@pytest.mark.parametrize("acceptance", [0.65, 0.8])
def test_a_lone_request_drafts_again_soon_after_drafts_that_failed(acceptance: float) -> None:
    server = Server(Machine(), {1: 0.0})
    server.run(16)
    server.accepted = {1: acceptance}
    assert sum(shape != PLAIN for shape in server.run(1000)) > 800


def test_requests_whose_drafts_fail_decode_plainly_beside_others() -> None:
    server = Server(Machine(), {1: 0.95, 2: 0.0})
    server.run(80)
    drafted = Counter[int]()
    for _ in range(60):
        server.step()
        drafted.update(one.sequence_id for one in server.sequences if server.controller.fanout(one))
    assert drafted[1] > 50
    assert drafted[2] < 10


def test_a_shape_that_is_slower_than_measured_gives_way_to_another_not_to_plain_decoding() -> None:
    machine = Machine()
    server = Server(machine, {1: 0.8})
    best = mostly(server.run(200))
    machine.shape_times = {best: 1.4}
    server.run(400)
    assert mostly(server.run(200)) not in (best, PLAIN)


def test_a_machine_that_becomes_slower_for_all_steps_changes_nothing_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain decoding seems faster at first, because its steps were measured before. The wrong
    variant assumes that only drafting has become slower.
    """
    num_plain = {}
    for drift in (0.03, 0.0):
        machine = Machine(node_s=0.003)
        monkeypatch.setattr(step_time, "_MACHINE_DRIFT", drift)
        server = Server(machine, {1: 0.8})
        with without_trials():
            server.run(200)
            machine.times = 2.5
            num_plain[drift] = server.run(300).count(PLAIN)
    assert num_plain[0.03] < 30
    assert num_plain[0.03] <= num_plain[0.0] / 2


def test_a_choice_is_kept_until_another_is_clearly_better() -> None:
    server = Server(Machine(noise=0.02), {1: 0.8})
    server.run(600)
    shapes = server.run(400)
    assert shapes.count(mostly(shapes)) > 320


# -- parts -----------------------------------------------------------------------------------------


@given(num_drafts=st.integers(1, 16), draft_length=st.integers(1, 16))
def test_the_menu_never_drafts_more_nodes_than_asked(num_drafts: int, draft_length: int) -> None:
    shapes = menu(num_drafts, draft_length, 16)
    assert (num_drafts, draft_length) in shapes
    assert all(k <= num_drafts and k * n <= num_drafts * draft_length for k, n in shapes)
