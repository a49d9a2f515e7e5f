"""The model of step times: fitted to measured steps, it follows the machine, and prompts and plain
steps come out.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from engine.control import step_time
from engine.control.step_time import Point, StepTimes, sizes_of
from engine.control.step_work import MIXED, PLAIN, Shape, StepWork, draft_passes
from engine.plan import Plan, Row
from engine.request import Sampling, Speculation, TextDraft
from tests.scheduling.machine import Machine, chains

USUAL = chains(1, (1, 3))


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


def serve(times: StepTimes, machine: Machine, works: list[StepWork], num_steps: int, in_a_row: int = 40) -> None:
    """Steps of these works, each several times in a row."""
    for number in range(num_steps):
        work = works[number // in_a_row % len(works)]
        draft_s, rest_s = machine.parts_s(work)
        times.observe(work, draft_s, rest_s, machine.now)
        machine.now += draft_s + rest_s


def errors(times: StepTimes, machine: Machine, works: list[StepWork]) -> np.ndarray:  # type: ignore[type-arg]
    """[works] how far predictions are from what steps take, as a share."""
    return times.step_s(works) / np.array([machine.step_s(work) for work in works]) - 1


# -- what a step does ------------------------------------------------------------------------------


def test_the_work_of_a_plan_counts_what_every_pass_computes() -> None:
    plan = Plan(
        (
            row(0, draft_input_ids=2, fanout=(2, 1, 1)),
            row(1, draft_input_ids=1, fanout=(2, 1, 1)),
            row(2, first_index=40),
            row(3, input_ids=30, draft_input_ids=30, first_index=100, emits=False),
            row(4, input_ids=5, draft_input_ids=5, first_index=0, fanout=(2, 1, 1)),
        )
    )
    assert StepWork.of(plan) == StepWork(
        rows=4,
        text=11 + 11 + 41 + 5,
        nodes=18,
        num_drafting=3,
        passes=(3, 6, 6),
        prompt=30 + 4,
        prompt_text=30 * (100 + 15) + 4 * 2,
        read=(2 + 1 + 30 + 5) - 3,
        shape=(2, 3),
    )
    assert StepWork.of(Plan((row(),))) == StepWork(rows=1, text=11) == StepWork.of(Plan((row(),))).plain
    odd = StepWork.of(Plan((row(input_ids=8, draft_input_ids=3, first_index=20, fanout=(2,)),)))
    assert (odd.prompt, odd.prompt_text, odd.read, odd.shape) == (7, 7 * 23, 2, (2, 1))
    assert odd.plain == StepWork(rows=1, text=28)
    assert odd.without_prompts == replace(odd, prompt=0, prompt_text=0, read=1), "the draft model read them, too"
    assert odd.without_drafts == StepWork(rows=1, text=28, prompt=7, prompt_text=7 * 23)


TEXT_DRAFT = TextDraft("lookup", (1, 2, 3))


@pytest.mark.parametrize(
    ("drafting", "nodes", "passes", "shape"),
    [
        (({"fanout": (1,)}, {"fanout": (1, 1)}), 3, (2, 1), MIXED),
        (({"fanout": (2, 2)},), 6, (1, 2), MIXED),
        (({"fanout": (3, 1, 2)},) * 2, 24, (2, 6, 6), MIXED),
        (({"fanout": (3, 1)}, {}), 6, (1, 3), (3, 2)),
        (({"text_drafts": (TEXT_DRAFT,)},), 3, (), MIXED),
        (({"text_drafts": (TEXT_DRAFT,)},) * 2, 6, (), MIXED),
        (({"text_drafts": (TEXT_DRAFT,), "fanout": (2, 1)},) * 2, 14, (2, 4), MIXED),
        (({"text_drafts": (TEXT_DRAFT,)}, {"fanout": (2, 1)}), 7, (1, 2), MIXED),
        (({}, {}), 0, (), PLAIN),
    ],
)
def test_only_rows_that_draw_the_same_chains_have_a_shape(
    drafting: tuple[dict[str, Any], ...], nodes: int, passes: tuple[int, ...], shape: Shape
) -> None:
    """Trees are no shapes of the menu, nor are text drafts."""
    work = StepWork.of(Plan(tuple(row(number, **fields) for number, fields in enumerate(drafting))))
    num_drafting = sum(bool(fields) for fields in drafting)
    assert (work.nodes, work.num_drafting, work.passes, work.shape) == (nodes, num_drafting, passes, shape)


def test_nodes_of_the_last_depth_are_in_no_pass_of_the_draft_model() -> None:
    assert draft_passes(()) == ()
    assert draft_passes(((3, 3),)) == (1, 3)
    assert draft_passes(((1,), (4, 4, 4), (2, 2))) == (3, 6, 4)


def test_only_requests_that_draw_drafts_take_the_draft_model_time_for_their_texts() -> None:
    """The wrong variant counts requests with text drafts, too."""
    drawing = ({"fanout": (1, 1, 1)},)
    with_text_drafts = ({"text_drafts": (TEXT_DRAFT,)},) * 3
    plain: tuple[dict[str, Any], ...] = ({},) * 3
    sizes = []
    for others in (plain, with_text_drafts):
        rows = [row(number, **fields) for number, fields in enumerate((*drawing, *others))]
        sizes.append(sizes_of(StepWork.of(Plan(tuple(rows))), 0, False)[-2:])
    assert sizes[0][0] == 3 * 11, "three passes over a text"
    assert sizes[1].tolist() == sizes[0].tolist()


# -- fitting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [{}, {"node_s": 1e-6}, {"free_tokens": 16, "node_s": 0.003}, {"text_s": 1e-6}])
def test_steps_between_and_beyond_the_measured_points_are_predicted(costs: dict[str, float]) -> None:
    machine = Machine(**costs)  # type: ignore[arg-type]
    times = StepTimes(machine.points())
    assert abs(errors(times, machine, [work for work, _, _ in times.points])).max() < 0.05
    others = [chains(rows, shape) for rows in (1, 2, 3, 6, 12) for shape in ((1, 2), (2, 3), (3, 4), (1, 8))]
    others += [StepWork(rows=rows, text=rows * 90) for rows in (1, 3, 11, 100)]
    assert abs(errors(times, machine, others)).max() < 0.12
    assert np.median(abs(errors(times, machine, others))) < 0.03


@pytest.mark.parametrize("measured", [(32, 256, 1024), (32, 1024)])
def test_each_token_of_a_longer_text_takes_longer(measured: tuple[int, ...]) -> None:
    """Long texts leave the caches of some processors. The wrong variant measures the ends alone."""

    def step_s(work: StepWork) -> float:
        length = work.text / work.rows
        return 0.009 + 2.7e-6 * work.text + 3.3e-6 * work.rows * max(0.0, length - 256)

    lengths = {1: measured, 4: measured, 2: (32,), 8: (32,)}
    works = [StepWork(rows=rows, text=rows * length) for rows, texts in lengths.items() for length in texts]
    times = StepTimes([(work, 0.0, step_s(work)) for work in works])
    usual = [StepWork(rows=4, text=4 * length) for length in (128, 280, 500)]
    ratios = times.step_s(usual) / np.array([step_s(work) for work in usual]) - 1
    assert (abs(ratios).max() < 0.03) == (256 in measured), ratios


def test_a_lone_request_is_computed_in_a_way_of_its_own() -> None:
    """On a CPU, several sequences cost a fixed amount more than one, and more for each token of
    their texts.
    """

    def parts_s(work: StepWork) -> tuple[float, float]:
        together = work.rows > 1
        draft_s = len(work.passes) * (0.001 + 0.001 * together) + (4e-7 + 3e-7 * together) * work.text * len(
            work.passes
        )
        return draft_s, 0.01 + 0.003 * together + 1e-4 * (work.rows + work.nodes) + (4e-6 + 3e-6 * together) * work.text

    plain = [StepWork(rows=rows, text=rows * length) for rows in (1, 2, 4, 16) for length in (32, 256, 1024)]
    drafting = [chains(rows, shape, length) for rows in (1, 4) for shape in ((1, 3), (4, 3)) for length in (256, 1024)]
    times = StepTimes([(work, *parts_s(work)) for work in [*plain, *drafting]])
    others = [StepWork(rows=1, text=100), StepWork(rows=3, text=900), chains(1, (1, 5), 120), chains(3, (2, 4), 500)]
    assert times.step_s(others) == pytest.approx([sum(parts_s(work)) for work in others], rel=0.04)


def test_more_work_never_has_a_shorter_time() -> None:
    """However noisy the measurements were."""
    machine = Machine(noise=0.3)
    times = StepTimes(machine.points())
    for work_of in (lambda n: chains(n, (1, 3)), lambda n: StepWork(rows=n, text=9), lambda n: chains(1, (n, 4))):
        seconds = times.step_s([replace(work_of(n), shape=MIXED) for n in range(1, 200, 3)])
        assert (np.diff(seconds) >= -1e-12).all()


def test_the_draft_model_reads_no_more_of_a_text_than_its_window() -> None:
    works = [chains(1, (1, 3), text) for text in (1, 100, 300, 900)]
    points: list[Point] = [(work, 0.003 + 1e-5 * 3 * min(work.text, 300), 0.01) for work in works]
    inside = StepTimes(points, window=300)
    assert inside.step_s([chains(1, (1, 3), 5000)])[0] == pytest.approx(0.013 + 0.009, rel=0.02)
    assert StepTimes(points).step_s([chains(1, (1, 3), 5000)])[0] > 0.03


def test_no_step_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if noise has left no rate for what a step consists of."""
    monkeypatch.setattr("scipy.optimize.nnls", lambda system, _: (np.zeros(system.shape[1]), 0.0))
    works = [StepWork(rows=rows, text=32 * rows) for rows in (1, 2, 4, 16)]
    seconds = StepTimes([(work, 0.0, 0.001 * work.rows) for work in works]).step_s(works)
    assert (seconds > 0).all()
    assert np.isfinite(seconds).all()


def test_points_are_written_and_read_again() -> None:
    points = Machine().points()
    again = msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(points))), list[Point])
    works = [work for work, _, _ in points]
    assert again == points
    assert (StepTimes(again).step_s(works) == StepTimes(points).step_s(works)).all()


def test_a_start_that_finds_all_steps_slower_scales_them() -> None:
    times, machine = StepTimes(Machine().points()), Machine(times=1.4)
    times.scale(1.4)
    assert abs(errors(times, machine, [USUAL, StepWork(rows=4, text=4), USUAL.plain])).max() < 0.03


# -- following the steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("drift", [0.03, 0.0])
def test_steps_with_drafts_tell_that_the_machine_is_slower_now(drift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slower machine is seen without a plain step. The wrong variant takes the machine to be as
    it was.
    """
    machine = Machine(noise=0.08)
    monkeypatch.setattr(step_time, "_MACHINE_DRIFT", drift)
    times = StepTimes(machine.points())
    serve(times, machine, [USUAL, StepWork(rows=1, text=1)], 400)
    machine.times = 1.5
    serve(times, machine, [USUAL], 1500)
    assert errors(times, Machine(times=1.5), [USUAL])[0] == pytest.approx(0.0, abs=0.04)
    others = errors(times, Machine(times=1.5), [USUAL.plain, chains(1, (1, 5)), chains(1, (4, 5))])
    assert (abs(others) < 0.1).all() == (drift > 0)


def test_plain_steps_tell_apart_what_only_drafting_takes_more() -> None:
    machine = Machine(noise=0.08)
    times = StepTimes(machine.points())
    machine.drafting_times = 1.4
    serve(times, machine, [USUAL] * 15 + [USUAL.plain], 6000)
    assert abs(errors(times, Machine(drafting_times=1.4), [USUAL, USUAL.plain])).max() < 0.05


def test_a_shape_of_its_own_kind_is_learned_without_the_others() -> None:
    machine = Machine(shape_times={(1, 3): 1.3})
    times = StepTimes(Machine().points())
    serve(times, machine, [USUAL, chains(1, (1, 2)), USUAL.plain], 3000, in_a_row=8)
    assert abs(errors(times, machine, [USUAL, chains(1, (1, 2)), USUAL.plain])).max() < 0.03


def test_sizes_tell_of_those_near_them() -> None:
    """Sixteen requests are fifteen for a while whenever one ends."""
    machine = Machine(node_s=0.0015)
    times = StepTimes(Machine().points())
    serve(times, machine, [chains(16, (1, 3))], 400)
    assert errors(times, machine, [chains(15, (1, 3)), chains(14, (1, 3))]) == pytest.approx(0.0, abs=0.03)


def test_one_slow_step_is_no_rule() -> None:
    machine = Machine()
    times = StepTimes(machine.points())
    serve(times, machine, [USUAL], 40)
    times.observe(USUAL, 0.002, 9.0, machine.now)
    assert abs(errors(times, machine, [USUAL, USUAL.plain])).max() < 0.2


def test_the_first_step_of_a_shape_behind_others_tells_nothing() -> None:
    """Something may have to warm up."""
    times = StepTimes(Machine().points())
    before = times.step_s([USUAL, USUAL.plain])
    for number in range(20):
        times.observe([USUAL, USUAL.plain][number % 2], 0.001, 0.5, 0.0)
    assert (times.step_s([USUAL, USUAL.plain]) == before).all()
    times.observe(USUAL.plain, 0.0, 0.5, 0.0)
    assert (times.step_s([USUAL, USUAL.plain]) > before).all()


@pytest.mark.slow
@pytest.mark.parametrize("believed", [False, True])
def test_a_plain_step_takes_what_it_takes_among_plain_steps(believed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of plain decoding begin with slow steps, as drafting ones have left other weights in
    the caches.

    The wrong variant believes these steps as much as the later ones.
    """
    machine = Machine(noise=0.05)
    if believed:
        monkeypatch.setattr(step_time, "_COLD_STD", 0.15)
    times = StepTimes(machine.points())
    slower = (1.2, 1.15, *(1.1,) * 16, *(1.0,) * 12)
    for number in range(16000):
        behind = number % 640
        work = USUAL.plain if behind < len(slower) else USUAL
        draft_s, rest_s = machine.parts_s(work)
        rest_s *= slower[behind] if behind < len(slower) else 1.0
        times.observe(work, draft_s, rest_s, machine.now)
        machine.now += draft_s + rest_s
    error = errors(times, Machine(), [USUAL.plain])[0]
    assert (abs(error) > 0.02) == believed, error


def test_a_cold_step_that_is_much_faster_than_expected_is_believed() -> None:
    """Plain steps were measured while the machine was busy: the first trial shows it."""
    machine = Machine(shape_times={PLAIN: 0.6})
    times = StepTimes(Machine().points())
    serve(times, machine, [USUAL], 100)
    assert errors(times, machine, [USUAL.plain])[0] > 0.5
    serve(times, machine, [USUAL.plain], 8)
    assert errors(times, machine, [USUAL.plain])[0] < 0.35


@pytest.mark.parametrize("pause_s", [60.0, 0.0])
def test_old_observations_give_way_to_measurements(pause_s: float) -> None:
    """And is as uncertain as before: so that it is tried again."""
    machine = Machine(shape_times={(1, 3): 1.3})
    times = StepTimes(Machine().points())
    shapes = [USUAL, USUAL.plain]
    unknown = times.log_covariance(shapes)
    serve(times, machine, shapes, 2000)
    assert errors(times, machine, [USUAL])[0] == pytest.approx(0.0, abs=0.03)
    for number in range(200):
        times.observe(USUAL.plain, 0.0, machine.step_s(USUAL.plain), machine.now + pause_s * number)
    now, known = errors(times, machine, [USUAL])[0], times.log_covariance(shapes)
    assert (now < -0.2) == (pause_s > 0)
    contrast = [float(one[0, 0] + one[1, 1] - 2 * one[0, 1]) for one in (unknown, known)]
    assert (contrast[1] > 0.5 * contrast[0]) == (pause_s > 0)
    assert contrast[1] < 1.01 * contrast[0]


def test_uncertainty_is_that_of_how_shapes_compare() -> None:
    """Uncertainty about the machine is common to all shapes; unseen shapes are uncertain, seen ones
    are not.
    """
    machine = Machine(noise=0.05)
    times = StepTimes(machine.points())
    works = [USUAL.plain, USUAL, chains(1, (2, 5))]
    serve(times, machine, works[:2], 2000)
    covariance = times.log_covariance(works)
    assert np.linalg.eigvalsh(covariance).min() > -1e-12
    known, unknown = (covariance[0, 0] + covariance[other, other] - 2 * covariance[0, other] for other in (1, 2))
    assert known < 0.03**2 < unknown


def test_the_variance_stays_one_over_many_steps() -> None:
    """For steps of every size, with pauses: no direction gets a negative variance, nothing grows
    without bound.
    """
    machine, random = Machine(noise=0.2), np.random.default_rng(3)
    times = StepTimes(machine.points())
    works = [chains(int(rows), shape) for rows in (1, 5, 16, 60) for shape in ((1, 1), (1, 5), (4, 3))]
    works += [StepWork(rows=3, text=900), replace(USUAL, prompt=200, read=200), replace(USUAL, shape=MIXED)]
    for number in range(6000):
        work = works[int(random.integers(len(works))) if number % 3 == 0 else number // 3 % len(works)]
        times.observe(work, *machine.parts_s(work), machine.now)
        machine.now += random.exponential(5.0)
    covariance = times.log_covariance(works)
    assert np.linalg.eigvalsh(covariance).min() > -1e-9
    assert covariance.max() < 1.0
    assert np.isfinite(times.step_s(works)).all()


def test_more_shapes_than_there_is_room_for_share_a_factor() -> None:
    times = StepTimes(Machine().points())
    for length in range(1, 40):
        for _ in range(3):
            times.observe(chains(1, (1, length)), 0.01, 0.02, 0.0)
    assert np.isfinite(times.step_s([chains(1, (1, 39)), chains(1, (3, 39))])).all()


@pytest.mark.parametrize("prompt_s", [0.0003, 0.0006])
def test_a_prompts_time_is_what_a_step_has_beyond_the_same_without_it(prompt_s: float) -> None:
    machine = Machine(prompt_s=0.0003)
    times = StepTimes(machine.points())
    with_prompt = replace(USUAL, prompt=64, read=64)
    machine.prompt_s = prompt_s
    _, rest_s = machine.parts_s(with_prompt)
    assert rest_s - times.rest_s(with_prompt.without_prompts) == pytest.approx(64 * prompt_s, abs=0.0005)
    serve(times, machine, [USUAL, with_prompt], 800)
    assert rest_s - times.rest_s(with_prompt.without_prompts) == pytest.approx(64 * prompt_s, rel=0.1)
    assert errors(times, machine, [replace(USUAL, prompt=64, read=64)])[0] == pytest.approx(0.0, abs=0.03)
    assert times.rest_s(USUAL.plain) == pytest.approx(0.01, rel=0.1), "plain steps are as they were"
