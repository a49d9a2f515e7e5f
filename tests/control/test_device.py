"""A GPU whose steps are recorded in part: times, shapes and prompts follow from calibration on a
synthetic one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine.config import SchedulerConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.control.step_work import PLAIN, Shape, StepWork
from engine.request import Sampling, Speculation
from engine.scheduling.prompts import PromptLimit
from engine.start import calibration
from engine.start.calibration import synthetic_plan
from tests.control.device import LIMITS, Device, Load
from tests.grid import grid
from tests.scheduling.machine import chains
from tests.wrong import instead

OFF = Speculation()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def times_of(device: Device, knows_eager: bool = True) -> StepTimes:
    """Return the times after a start; the wrong variant takes all steps to be recorded."""
    options = {"is_eager": device.recorded.is_eager} if knows_eager else {}
    return StepTimes(device.measured(), **options)


def reading(work: StepWork, prompt: int, first: int = 0) -> StepWork:
    """The same work with tokens of a prompt, which the draft model reads if others draft."""
    text = prompt * (first + prompt // 2)
    return replace(work, prompt=prompt, prompt_text=text, read=prompt if work.num_drafting else 0)


def errors(times: StepTimes, device: Device, works: list[StepWork]) -> np.ndarray:  # type: ignore[type-arg]
    """[works] how far predictions are from what steps take, as a share."""
    return times.step_s(works) / np.array([sum(device.true_s(work)) for work in works]) - 1


DECODING = [StepWork(rows=rows, text=300 * rows) for rows in (1, 3, 8, 16, 40, 64)]
DRAFTING = [
    chains(rows, shape, 300) for rows in (1, 4, 8, 16, 32) for shape in ((1, 1), (1, 3), (2, 5), (4, 3), (4, 5))
]
READING = [reading(work, prompt) for work in (DECODING[3], *DRAFTING[15:19]) for prompt in (8, 100, 500, 1000, 2000)]


@pytest.mark.parametrize("knows_eager", [True, False])
def test_recorded_and_other_steps_are_predicted(device: Device, knows_eager: bool) -> None:
    """The wrong variant charges the tokens that the draft model reads for what passes launched one
    by one take.
    """
    times = times_of(device, knows_eager)
    ratios = errors(times, device, [*DECODING, *DRAFTING, *READING])
    assert (abs(ratios).max() < 0.08) == knows_eager, ratios
    assert (times.read_s(1) < 3e-6) == knows_eager, times.read_s(1)


def test_a_device_without_recorded_steps_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, is_recorded=False)
    assert abs(errors(times_of(device), device, [*DECODING, *DRAFTING, *READING])).max() < 0.08


@pytest.mark.parametrize("measures_large", [True, False])
def test_large_chunks_of_prompts_are_predicted(device: Device, measures_large: bool) -> None:
    """A GPU takes as long for 128 tokens as for one, which says nothing of 2,048. The wrong variant
    stops there, as on a CPU: a step after a long text takes much longer than it may, and plain
    steps seem slow after those with prompts.
    """
    small = instead(calibration, "_chunks_on_device", lambda *_: [32, 128])
    with nullcontext() if measures_large else small:
        times = times_of(device)
    decoding = StepWork(rows=32, text=16_000)
    limit = PromptLimit(times, decoding.rows, decoding.text)
    taken_s = device.true_s(reading(decoding, limit.most(16_000, 2016), 16_000))[1]
    assert (taken_s < 1.1 * limit._most_s) == measures_large, taken_s
    now, work = 0.0, reading(decoding, 512)
    for _ in range(200):
        rest_s = device.true_s(work)[1]
        times.observe(work, 0.0, rest_s, now)
        now += rest_s
    assert (abs(errors(times, device, [decoding])[0]) < 0.05) == measures_large


@pytest.mark.parametrize(
    ("budget", "most_prompt", "context", "largest"),
    [(2048, 0, 40960, 2047), (2048, 700, 40960, 700), (300, 0, 40960, 299), (2048, 0, 1024, 767), (2048, 0, 64, 31)],
)
def test_no_chunk_is_longer_than_a_step_or_a_text(
    device: Device, budget: int, most_prompt: int, context: int, largest: int
) -> None:
    device.scheduler.config = SchedulerConfig(max_num_batched_tokens=budget, max_prompt_tokens=most_prompt)
    device.facts.max_model_len = context
    works = [work for work, _, _ in device.measured() if work.prompt]
    assert max(work.prompt for work in works) == largest
    assert all(work.text + work.prompt <= context for work in works)
    device.target.device.type = "cpu"
    assert all(work.prompt in (32, 128) for work, _, _ in device.measured() if work.prompt)


def test_recorded_steps_follow_from_sizes(device: Device) -> None:
    """`find` decides the same for plans of usual requests."""
    shapes: list[Shape] = [PLAIN, (1, 1), (1, 3), (2, 5), (4, 3), (4, 5), (8, 8)]
    answers = set()
    for rows in (1, 5, 12, 13, 16, 40, 64, 65):
        for num_drafts, length in shapes:
            for num_prompt, num_read in ((0, 1), (0, 2), (0, 3), (9, 1)):
                drafts = replace(LIMITS, num_drafts=num_drafts, draft_length=length)
                engine: Any = device
                plan = synthetic_plan(engine, rows, 99, drafts if num_drafts else OFF, num_prompt, num_read)
                is_eager = device.recorded.find(plan) is None
                assert device.recorded.is_eager(StepWork.of(plan)) == is_eager, (rows, num_drafts, length, num_read)
                answers.add(is_eager)
    assert answers == {True, False}
    mixed = replace(chains(16, (1, 4)), shape=(0, 1))
    assert not device.recorded.is_eager(mixed)
    assert device.recorded.is_eager(replace(mixed, nodes=16 * 20)), "320 nodes, and 256 rows are recorded"
    device.recorded.serves = False
    assert not device.recorded.is_eager(reading(mixed, 9)), "then all steps are alike"


def served(device: Device, times: StepTimes, speculation: Speculation, num_steps: int = 300) -> tuple[float, float]:
    """Return (tokens per second, reported speedup) of 16 clients with prompts of 1,000 tokens and
    answers of 128.
    """
    device.serve_anew(times)
    load = Load(device, 16, 1000, 128, speculation)
    rate = load.rate(num_steps)
    return rate, load.timing.speedup


def rate_of(speculation: Speculation) -> float:
    """Tokens per second of a shape that no controller chooses."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = Device(monkeypatch)
        return served(device, times_of(device), speculation)[0]


@pytest.fixture(scope="module")
def plain_rate() -> float:
    """Tokens per second of plain decoding."""
    return rate_of(OFF)


@pytest.fixture(scope="module")
def best(plain_rate: float) -> float:
    """Tokens per second of the best fixed shape."""
    fixed = [replace(LIMITS, num_drafts=k, draft_length=length, adaptive=False) for k, length in ((1, 3), (4, 3))]
    return max(plain_rate, *map(rate_of, fixed))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["", "all steps are recorded", "drafts with prompts"])
def test_adaptive_requests_with_prompts_are_as_fast_as_the_best_shape(device: Device, best: float, wrong: str) -> None:
    """The wrong variants decode plainly, because reading prompts seems to take the draft model
    long; or draft in steps with prompts, whose passes are not recorded.
    """
    points, options = device.measured(), {"is_eager": device.recorded.is_eager}
    always = instead(Controller, "drafts_in_step", lambda *_: True)
    with always if wrong == "drafts with prompts" else nullcontext():
        times = StepTimes(points, **({} if wrong == "all steps are recorded" else options))
        rate, _ = served(device, times, LIMITS)
    assert (rate > 1.04 * best) == (not wrong), rate / best


@pytest.mark.slow
@pytest.mark.parametrize("knows_eager", [True, False])
def test_the_reported_speedup_counts_passes_that_are_not_recorded(
    device: Device, plain_rate: float, knows_eager: bool
) -> None:
    drafting = replace(LIMITS, num_drafts=4, draft_length=3, adaptive=False)
    rate, reported = served(device, times_of(device, knows_eager), drafting)
    assert (abs(reported / (rate / plain_rate) - 1) < 0.09) == knows_eager, (reported, rate / plain_rate)


NEVER_RECORDED = {"penalty": Sampling(frequency_penalty=0.5), "seed_stable": Sampling(seed_stable=True)}


def by_prediction(observe: Any, times: StepTimes, work: StepWork, *observed: Any) -> None:
    observe(times, replace(work, is_eager=None), *observed)


@pytest.mark.sampled
@pytest.mark.parametrize("knows_eager", [True, False])
@pytest.mark.parametrize("sampling", NEVER_RECORDED)
def test_steps_that_are_never_recorded_say_nothing_of_recorded_ones(
    device: Device, sampling: str, knows_eager: bool
) -> None:
    """Their sizes are those of recorded steps, for which the wrong variant takes them."""
    times = times_of(device)
    device.serve_anew(times)
    drafting = replace(LIMITS, num_drafts=4, draft_length=3, adaptive=False)
    for speculation in (OFF, drafting):
        load = Load(device, 4, 60, 100, speculation, sampling=NEVER_RECORDED[sampling])
        with nullcontext() if knows_eager else instead(StepTimes, "observe", by_prediction):
            load.rate(300, warm=0)
        device.serve_anew(times)
    ratios = errors(times, device, [DECODING[1], *DRAFTING[5:10]])
    assert (abs(ratios).max() < 0.12) == knows_eager, ratios


@pytest.mark.sampled
@pytest.mark.parametrize("knows_plain", [True, False])
def test_the_reported_speedup_compares_with_plain_steps_that_are_not_recorded_either(
    device: Device, knows_plain: bool
) -> None:
    """The wrong variant compares with recorded ones."""
    drafting = replace(LIMITS, num_drafts=4, draft_length=3, adaptive=False)

    def predicted(step_s: Any, times: StepTimes, works: list[StepWork]) -> Any:
        return step_s(times, [replace(works[0], is_eager=None), *works[1:]])

    rates = []
    for speculation in (OFF, drafting):
        device.serve_anew(times_of(device))
        load = Load(device, 4, 60, 100, speculation, sampling=NEVER_RECORDED["seed_stable"])
        with nullcontext() if knows_plain else instead(StepTimes, "step_s", predicted):
            rates.append(load.rate(500))
    reported, true = load.timing.speedup, rates[1] / rates[0]
    assert (abs(reported / true - 1) < 0.09) == knows_plain, (reported, true)


def unaware(choose: Any, controller: Controller, *asked: Any) -> None:
    choose(controller, *asked[:-1], False)


@pytest.mark.slow
@pytest.mark.parametrize("knows_eager", [True, False])
@pytest.mark.parametrize("clients", grid([4, 16], {4}))
def test_drafts_of_steps_that_are_never_recorded_are_priced_as_they_run(
    device: Device, clients: int, knows_eager: bool
) -> None:
    """The wrong variant takes their passes for recorded ones, and is no faster than plain
    decoding.
    """
    rates = []
    for speculation in (OFF, LIMITS):
        device.serve_anew(times_of(device))
        load = Load(device, clients, 60, 100, speculation, sampling=NEVER_RECORDED["penalty"])
        with nullcontext() if knows_eager else instead(Controller, "choose", unaware):
            rates.append(load.rate(400))
    assert (rates[1] > 1.06 * rates[0]) == knows_eager, rates


KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "penalty": {"sampling": NEVER_RECORDED["penalty"]},
    "min_tokens": {"min_tokens": 30},
    "rule": {"speculation": replace(LIMITS, rule="weighted_race")},
    "lossy": {"speculation": replace(LIMITS, over_acceptance=0.1)},
    "method": {"speculation": replace(LIMITS, rule="nss", draft_method="greedy")},
}


BESIDE: dict[str, dict[str, Any]] = {
    "penalty": {"speculation": OFF, "sampling": NEVER_RECORDED["penalty"]},
    "tree": {"speculation": replace(LIMITS, tree=(2, 2), adaptive=False)},
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "beside"),
    grid(
        [(kind, beside) for kind in KINDS for beside in (None, *BESIDE)],
        {*((kind, None) for kind in KINDS), *(("usual", beside) for beside in BESIDE)},
    ),
)
def test_the_controller_knows_which_steps_are_recorded(device: Device, kind: str, beside: str | None) -> None:
    """Adaptive requests of each kind, alone or together with one that is not adaptive."""
    device.serve_anew(times_of(device))
    load = Load(device, 4, 60, 100, **{"speculation": LIMITS, **KINDS[kind]})
    if beside:
        load.submit(5000, **BESIDE[beside])
    controller, options = device.scheduler.controller, []
    assert controller is not None

    def noted(options_of: Any, *asked: Any) -> Any:
        options.append(options_of(*asked))
        return options[-1]

    num_compared = 0
    with instead(Controller, "_options", noted):
        for _ in range(300):
            options.clear()
            load.step()
            taken = load.works[-1]
            # Which the controller does not know yet.
            reads = taken.prompt > 0 or taken.read > taken.num_drafting
            for work in options[-1].works if options and not reads else ():
                if (work.shape, work.rows, work.nodes) == (taken.shape, taken.rows, taken.nodes):
                    num_compared += 1
                    assert controller.times.is_eager(work) == device.telemetry.is_eager, (work, taken)
    assert num_compared > 5


@pytest.mark.slow
@pytest.mark.parametrize("returns", [True, False])
def test_steps_of_a_trial_that_do_not_draft_are_not_counted(device: Device, returns: bool) -> None:
    """Prompts arrive steadily. The wrong variant spends the trials on plain steps."""

    def spent(drafts_in_step: Any, controller: Controller, num_prompt: int) -> bool:
        before = controller._num_tried
        drafts: bool = drafts_in_step(controller, num_prompt)
        controller._num_tried = before
        return drafts

    device.serve_anew(times_of(device))
    load, controller = Load(device, 16, 60, 20, LIMITS), device.scheduler.controller
    assert controller is not None
    num_drafted = num_plain = 0
    with nullcontext() if returns else instead(Controller, "drafts_in_step", spent):
        for _ in range(400):
            load.step()
            if controller._trial not in (None, PLAIN):
                num_drafted += load.works[-1].num_drafting > 0
                num_plain += not load.works[-1].num_drafting
    assert min(num_drafted, num_plain) > 3
    assert controller._num_tried == num_drafted + num_plain * (not returns)


@pytest.mark.sampled
@pytest.mark.parametrize(("num_weights", "is_recorded", "drafts"), [(8.2e9, 1, 0), (70e9, 1, 1), (8.2e9, 0, 1)])
def test_drafts_wait_for_prompts_if_their_passes_take_longer_than_their_tokens(
    monkeypatch: pytest.MonkeyPatch, num_weights: float, is_recorded: bool, drafts: bool
) -> None:
    """With a large target each token is worth them. If nothing is recorded, prompts change
    nothing.
    """
    device = Device(monkeypatch, bool(is_recorded), num_weights)
    device.serve_anew(times_of(device))
    load = Load(device, 4, 60, 100, LIMITS)
    load.rate(200, warm=100)
    with_prompts = [work for work in load.works if work.prompt]
    assert len(with_prompts) > 9
    assert (np.mean([work.num_drafting > 0 for work in with_prompts]) > 0.8) == drafts
    controller = device.scheduler.controller
    assert controller is not None
    assert controller.drafts_in_step(0)
    # The draft model has read the others' texts meanwhile, so the next step is a recorded one.
    if not drafts:
        after = [later for work, later in zip(load.works, load.works[1:], strict=False) if work.prompt > later.prompt]
        assert np.mean([device.recorded.is_eager(work) for work in after]) < 0.1
