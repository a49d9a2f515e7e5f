"""Steps are measured at start, and a step's stats say what plain decoding would have taken."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.control.controller import Controller
from engine.control.step_time import Point, StepTimes
from engine.control.step_work import PLAIN, StepWork
from engine.cpu.tiles import Tiles
from engine.cuda.recorded.inputs import DISTRIBUTIONS, StepShape
from engine.plan import Plan
from engine.request import Speculation
from engine.start import calibration
from engine.start.calibration import measure, measure_points, middle_steps
from engine.start.profile_cache import read_profile
from engine.step.engine import Engine
from engine.step.telemetry import Stopwatch
from tests.engine import tiny
from tests.scheduling.machine import Machine
from tests.wrong import instead

DRAFTS = Speculation(rule="bv_race", num_drafts=3, draft_length=3, adaptive=True)


def built() -> Engine:
    target = tiny.llama(seed=1)
    return tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4)


@pytest.fixture
def engine() -> Engine:
    return built()


def test_measured_steps_fit_the_pool_and_disturb_nothing(engine: Engine) -> None:
    text = tiny.prompts(101, [20])[0]
    request = tiny.request("0", text, Speculation(rule="bv_race", num_drafts=3, draft_length=3), temperature=1.0)
    target = tiny.llama(seed=1)
    before = tiny.run(tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4), [request]).tokens
    points = measure_points(engine, DRAFTS)
    assert {work.rows for work, _, _ in points} == {1, 2, 4}
    assert {work.shape for work, _, _ in points} == {(0, 0), (1, 1), (1, 3), (3, 3)}
    assert any(work.prompt for work, _, _ in points)
    assert any(work.read for work, _, _ in points)
    assert len({work.text // work.rows for work, _, _ in points}) > 1
    assert all(rest_s > 0 and (draft_s > 0) == bool(work.passes) for work, draft_s, rest_s in points if work.passes)
    assert {work.shape for work, _, _ in measure_points(engine, Speculation())} == {(0, 0)}
    engine.scheduler.check_invariants()
    assert tiny.run(engine, [request]).tokens == before


def test_measured_steps_stay_within_a_small_budget() -> None:
    target = tiny.llama(seed=1)
    small = tiny.build(target, tiny.perturbed(target, 2, 0.02), budget=32)
    for work, _, _ in measure_points(small, Speculation(rule="bv_race", num_drafts=4, draft_length=3)):
        assert work.nodes + work.prompt <= 32


class Told(StepTimes):
    """Step times that record what they receive."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.points())
        self.told: list[tuple[StepWork, float, float]] = []
        self.hosts_s: list[float | None] = []

    def observe(
        self, work: StepWork, draft_s: float, rest_s: float, started: float, host_s: float | None = None
    ) -> None:
        self.told.append((work, draft_s, rest_s))
        self.hosts_s.append(host_s)


def test_a_prompts_time_is_reported_and_the_draft_models_is_not() -> None:
    """A step's stats hold a plain step of the rows that emit, and what prompts took of the target's
    time.
    """
    target = tiny.llama(seed=1)
    for speculation in (Speculation(), Speculation(rule="block", num_drafts=1, draft_length=2)):
        engine = tiny.build(target, tiny.perturbed(target, 2, 0.02))
        engine.scheduler.times = times = Told(Machine(times=1e-3))
        engine.submit(tiny.request("0", [1, 2, 3], speculation, max_tokens=9))
        times.host.observe(StepWork(rows=1, text=3), 0.25)
        known = [engine.run_step().stats for _ in range(3)]
        # A plain step has planning and messages, too.
        plain_s = times.rest_s(StepWork(rows=1, text=3)) + 0.25
        assert [stats.usual_plain_s for stats in known] == pytest.approx([plain_s] * 3)
        assert all(0 < (stats.plain_s or 0) <= stats.wall_s - stats.prompt_s for stats in known)
        assert times.hosts_s[0] is None, "nothing passed before the first step"
        for stats, host_s, (_, draft_s, rest_s) in list(zip(known, times.hosts_s, times.told, strict=True))[1:]:
            assert host_s == pytest.approx(stats.wall_s - draft_s - rest_s)
        (work, draft_s, rest_s), *others = times.told
        assert (work.prompt, work.rows) == (2, 1)
        drafting = replace(work, shape=PLAIN)
        with_drafts_s = times.rest_s(drafting) - times.rest_s(drafting.without_prompts)
        alone_s = times.rest_s(work.without_drafts) - times.rest_s(work.plain)
        prompt_s = rest_s - times.rest_s(work.without_prompts) + alone_s - with_drafts_s
        assert known[0].prompt_s == pytest.approx(prompt_s)
        assert [stats.prompt_s for stats in known[1:]] == [0, 0]
        assert all(work.prompt == 0 for work, _, _ in others)
        assert known[0].phases_s["draft"] == draft_s
        assert draft_s + rest_s < known[0].wall_s


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"seed_stable": True}, {"presence_penalty": 0.5}], ids=str)
def test_steps_are_learned_as_they_ran(sampling: dict[str, Any]) -> None:
    """Recorded, except with the prompt, or of a request whose steps never are."""
    pytest.importorskip("triton")
    target = tiny.llama(seed=1)
    with tiny.with_recorded_steps([(0, 0)]):
        engine = tiny.build(target, None, max_num_seqs=2)
    engine.scheduler.times = times = Told(Machine())
    tiny.run(engine, [tiny.request("0", [1, 2, 3], max_tokens=4, **sampling)])
    assert [work.is_eager for work, _, _ in times.told] == [True, *[bool(sampling)] * 3]


class LateDevice:
    """Accepts work at once, and completes a phase after this many seconds."""

    def __init__(self, seconds: dict[int, float], last_is_done: bool = True) -> None:
        self.marks, self.of_phase, self.waited, self.last_is_done = 0, seconds, [], last_is_done

    def mark(self) -> int:
        self.marks += 1
        return self.marks - 1

    def seconds(self, begin: int, end: int) -> float | None:
        assert end == begin + 1
        return self.of_phase[begin // 2] if self.last_is_done or end + 1 < self.marks else None

    def wait(self, mark: int) -> None:
        self.waited.append(mark)
        self.last_is_done = True


def test_phases_are_as_long_as_the_device_takes() -> None:
    """The host has given the device its work long before that is done; reading the verdict takes
    the rest.
    """
    device = LateDevice({0: 0.001, 1: 0.03, 2: 0.002}, last_is_done=False)
    stopwatch = Stopwatch(device)
    stopwatch.start()
    with stopwatch.phase("parts"):
        with stopwatch.phase("target"):
            pass
        with stopwatch.phase("verify"):
            time.sleep(0.04)  # waits for the target's pass
        with stopwatch.phase("keep"):
            pass
    wall_s, phases_s = stopwatch.stop()
    assert (phases_s["target"], phases_s["verify"]) == pytest.approx((0.001, 0.03))
    assert phases_s["keep"] != pytest.approx(0.002), "what the device has not come to counts as the host saw it"
    assert 0.04 <= stopwatch.parts_s <= wall_s
    assert device.waited == []
    stopwatch.start()
    with stopwatch.phase("target"):
        pass
    device.of_phase[3] = 0.5
    assert stopwatch.stop(waits=True)[1]["target"] == pytest.approx(0.5)
    assert device.waited == [7], "a step after which nothing is read ends when the device is done"


def test_a_step_behind_an_aborted_request_does_not_pay_for_the_time_between() -> None:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, None)
    engine.submit(tiny.request("0", [1, 2, 3], max_tokens=5))
    engine.run_step()
    assert engine.abort("0")
    time.sleep(0.1)
    engine.submit(tiny.request("1", [1, 2, 3], max_tokens=5))
    began = time.perf_counter()
    stats = engine.run_step().stats
    assert stats.wall_s < time.perf_counter() - began


def test_what_the_controller_takes_is_not_plain_decodings() -> None:
    """A plain engine has none: otherwise answers would report that speculation gains more, the
    slower it chooses.
    """
    claimed_s = 1000.0

    class Slow(Controller):
        def choose(self, *asked: Any) -> None:
            self._next = 0
            super().choose(*asked)
            self.spent_s += claimed_s

    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02))
    engine.scheduler.times = times = StepTimes(Machine().points())
    engine.scheduler.controller = controller = Slow(times, 3)
    adaptive = Speculation(rule="block", num_drafts=1, draft_length=3, adaptive=True)
    engine.submit(tiny.request("0", [1, 2, 3], adaptive, max_tokens=30))
    engine.scheduler.times = times = Told(Machine())
    engine.run_step()
    engine.run_step()
    assert controller.spent_s > 2 * claimed_s, "what it really took is counted, too"
    assert times.hosts_s[0] is None
    assert times.hosts_s[1] is not None
    assert times.hosts_s[1] < -0.9 * claimed_s, "all that it says it took is taken off"


def measured(engine: Engine, folder: Path | str, num_drafts: int = 3, draft_window: int = 0) -> tuple[list[str], Any]:
    """(what was said, the points) of a start."""
    said: list[str] = []
    limits = SpeculationConfig(draft_window=draft_window)
    config = EngineConfig(model=ModelConfig(target="t"), speculation=limits, profile_cache=str(folder))
    speculation = Speculation(rule="bv_race", num_drafts=num_drafts, draft_length=3, adaptive=True)
    return said, measure(engine, config, speculation, said.append).points


@pytest.fixture(scope="module")
def first_points() -> list[Point]:
    """Steps of an engine, measured once."""
    return measure_points(built(), DRAFTS)


@pytest.fixture
def measures_once(first_points: list[Point]) -> Iterator[None]:
    """Measuring again finds the same."""
    with instead(calibration, "measure_points", lambda *_: first_points):
        yield


def taking(kept: Any, *factors: float) -> AbstractContextManager[Any]:
    """Let plain steps take this multiple of the stored time: of one row, and of several."""
    plain = {work.rows: rest_s + draft_s for work, draft_s, rest_s in reversed(kept) if work == work.plain}

    def steps(_right: Any, _: Engine, plans: list[Plan], *__: Any) -> list[tuple[float, dict[str, float]]]:
        ((rows,),) = {(len(plan.rows),) for plan in plans}
        return [(plain[rows] * factors[rows > 1], {"draft": 0.0})]

    return instead(calibration, "middle_steps", steps)


@pytest.mark.parametrize(
    ("factors", "why"),
    [
        ((1.3, 1.4), None),
        ((0.6, 0.65), None),
        ((0.9, 1.1), None),
        ((1.4, 1.0), None),
        ((2.2, 1.0), "changed unequally: 2.20 times as long with 1 request, 1.00 times as long with 2 requests"),
        ((0.9, 1.9), "plain steps changed unequally: 0.90 times as long with 1 request, 1.90"),
        ((3.1, 3.1), "plain steps changed too much: 3.10 times as long with 1 request, "),
        ((0.3, 0.3), "plain steps changed too much"),
    ],
)
@pytest.mark.usefixtures("measures_once")
def test_a_machine_that_is_faster_or_slower_as_a_whole_is_not_measured_again(
    engine: Engine, tmp_path: Path, factors: tuple[float, float], why: str | None
) -> None:
    """One factor corrects that; points that have changed differently are measured again, and the
    log says why.
    """
    _, kept = measured(engine, tmp_path)
    config = EngineConfig(model=ModelConfig(target="t"), profile_cache=str(tmp_path))
    said: list[str] = []
    works = [StepWork(rows=1, text=33), StepWork(rows=4, text=400)]
    with taking(kept, *factors):
        seconds = measure(engine, config, DRAFTS, said.append).step_s(works)
    if why is None:
        assert said == ["using the measurements of an earlier start"]
        assert seconds == pytest.approx(StepTimes(kept).step_s(works) * sum(factors) / 2)
    else:
        assert said[0].startswith("measuring steps (")
        assert why in said[0]
        assert seconds == pytest.approx(StepTimes(kept).step_s(works))


@pytest.mark.usefixtures("measures_once")
def test_steps_that_changed_unequally_are_less_certain_and_correct_what_was_measured(
    engine: Engine, tmp_path: Path
) -> None:
    """A few served steps then outweigh it; with equal factors they weigh less."""
    _, kept = measured(engine, tmp_path)
    config = EngineConfig(model=ModelConfig(target="t"), profile_cache=str(tmp_path))
    drafted = [work for work, *_ in kept if work.nodes][:1]
    ratios = []
    for factors in ((1.2, 1.2), (1.0, 1.4)):
        with taking(kept, *factors):
            times = measure(engine, config, DRAFTS, lambda _: None)
        before_s = float(times.step_s(drafted)[0])
        uncertain = float(times.log_covariance(drafted)[0, 0])
        for number in range(6):
            times.observe(drafted[0], before_s, before_s, started=float(number))
        ratios.append((uncertain, float(times.step_s(drafted)[0]) / before_s))
    assert ratios[1][0] > ratios[0][0]
    assert ratios[1][1] > ratios[0][1] > 1


@pytest.mark.usefixtures("measures_once")
def test_the_next_start_uses_what_was_measured(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    _, first = measured(engine, folder)
    with taking(first, 1.0, 1.0):
        said, second = measured(engine, folder)
    assert said == ["using the measurements of an earlier start"]
    assert second == first
    # Another shape is another measurement, and another window.
    assert "measuring" in measured(engine, folder, num_drafts=2)[0][0]
    assert "measuring" in measured(engine, folder, draft_window=64)[0][0]


@pytest.mark.usefixtures("measures_once")
def test_another_card_is_measured_even_if_all_its_steps_are_as_much_faster(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the same card with memory for fewer recorded steps, and a processor without tiles."""
    _, first = measured(engine, tmp_path)
    with taking(first, 0.5, 0.5):
        assert measured(engine, tmp_path)[0] == ["using the measurements of an earlier start"]
        with instead(calibration, "_device_name", lambda *_: "another"):
            assert "there are no measurements" in measured(engine, tmp_path)[0][0]
        with monkeypatch.context() as patched:
            patched.setattr(engine.target.backend, "remark", Tiles(False, "the system refuses tiles").remark)
            assert "there are no measurements" in measured(engine, tmp_path)[0][0]
        steps: Any = {StepShape(1, 0, 0, DISTRIBUTIONS[0]): None}
        engine.recorded.steps = steps
        assert "there are no measurements" in measured(engine, tmp_path)[0][0]


@pytest.mark.usefixtures("measures_once")
def test_measurements_that_cannot_be_used_are_made_again(engine: Engine, tmp_path: Path) -> None:
    measured(engine, tmp_path)
    (file,) = tmp_path.iterdir()
    kept = file.read_text()
    points, rates = json.loads(kept)
    for spoilt in (
        json.dumps([[point for point in points if point[0].get("nodes")], rates]),
        json.dumps([points, rates[1:]]),
        json.dumps([points, [float("nan"), *rates[1:]]]),
        json.dumps(points),
        "{",
        "[]",
        "",
        "null",
        "[[]]",
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        kept.replace("rows", "lines"),
        kept.replace("]", ',"x"]', 1),
    ):
        file.write_text(spoilt)
        assert "cannot be read" in measured(engine, tmp_path)[0][0]
        assert len(read_profile(file)[0]) > 9


@pytest.mark.usefixtures("measures_once")
def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a line in the log."""
    (tmp_path / "file").write_text("")
    said, *_ = measured(engine, tmp_path / "file")
    assert "measuring steps (there are no measurements of this pair" in said[0]
    assert f"measurements cannot be stored in {tmp_path / 'file'} (File exists)" in said[-1]
    assert "--profile-cache" in said[-1]
    assert [line for line in measured(engine, "off")[0] if "%" not in line] == [
        "measuring steps (--profile-cache keeps nothing)",
    ]

    def nobody(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    said, *_ = measured(engine, "~/somewhere")
    assert said[0].startswith("measurements cannot be stored (Could not determine home directory.)")
    assert "measuring" in said[1]


class FakeSteps:
    """An engine whose steps take as long as their plan says, three times that while the machine is
    busy.
    """

    def __init__(self, busy: range) -> None:
        self.busy, self.num_runs, self.telemetry, self.stopwatch = busy, 0, self, self
        self.elapsed = 0.0

    def carry_out(self, plan: Any) -> None:
        self.elapsed += plan * (3 if self.num_runs in self.busy else 1)
        self.num_runs += 1

    def start(self) -> None:
        self.elapsed = 0.0

    def stop(self) -> tuple[float, dict[str, float]]:
        return self.elapsed, {"draft": self.elapsed / 2}


def test_shares_grow_with_every_plan() -> None:
    """Turns of a large model take seconds; none of the shares is there twice, and only the last one
    is all.
    """
    engine: Any = FakeSteps(range(0))
    plans: Any = [0.001, 0.2, 3.0]
    shares: list[float] = []
    middle_steps(engine, plans, shares.append)
    assert shares == sorted(set(shares))
    assert shares[-1] == 1
    assert len(shares) == 4 * len(plans)


def test_plans_are_measured_in_turns() -> None:
    """A busy time meets a part of every plan's runs, which their middle halves leave out."""
    plans: Any = [0.001, 0.002, 0.003]
    for busy in (range(12), range(40, 50), range(60, 72)):
        engine: Any = FakeSteps(busy)
        assert [wall_s for wall_s, _ in middle_steps(engine, plans)] == pytest.approx(plans)
    # Slow steps count four times only, behind one that does not; the middle half is taken, and its
    # phases with it.
    engine = FakeSteps(range(2))
    assert middle_steps(engine, [0.2]) == [(pytest.approx(0.2), {"draft": pytest.approx(0.1)})]
    assert engine.num_runs == 5
    # The wrong variant measures one plan after the other.
    apart: list[float] = []
    engine = FakeSteps(range(20))
    for plan in plans:
        apart.append(middle_steps(engine, [plan])[0][0])
    assert apart[0] > 2 * 0.001
    assert apart[1:] == pytest.approx([0.002, 0.003])
