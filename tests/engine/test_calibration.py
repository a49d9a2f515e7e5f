"""Plain decoding is measured at start, and a step's stats say what a plain step would have taken."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine.calibration as calibration
from engine.calibration import measure, measure_plain, middle_steps
from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.engine import Engine
from engine.kept import read_kept
from engine.metrics import Overhead, PlainTimes, Stopwatch
from engine.pace import Beside, Pace, Step
from engine.plan import Plan
from engine.request import Speculation
from engine.scheduling.controller import Controller
from engine.scheduling.costs import Curve, NodeCosts, StepCosts, TextCosts
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
    engine.telemetry.pace = Pace(measure_plain(engine))
    assert engine.telemetry.pace.plain.num_rows == (1, 2, 4)
    assert all(seconds > 0 for row in engine.telemetry.pace.plain.seconds for seconds in row)
    engine.scheduler.check_invariants()
    assert tiny.run(engine, [request]).tokens == before


class Steps:
    """What engines told about their steps, and what was made of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Step] = []
        self.told: list[Beside | None] = []
        add = Pace.add

        def noted(pace: Pace, step: Step) -> Beside | None:
            self.steps.append(step)
            self.told.append(add(pace, step))
            return self.told[-1]

        monkeypatch.setattr(Pace, "add", noted)


def test_what_a_prompt_takes_beside_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, None)
    engine.telemetry.pace = Pace(PlainTimes((1, 64), (1,), ((0.5,), (0.5,))))
    steps = Steps(monkeypatch)
    engine.submit(tiny.request("0", [1, 2, 3], max_tokens=5))
    known = [engine.run_step().stats for _ in range(3)]
    # What lies between two steps is a plain step's, too.
    assert all(0.3 < (stats.plain_s or 0.0) < 0.6 for stats in known)
    assert known[0].prompt_s == steps.steps[0].seconds - 0.5
    assert 0 < steps.steps[0].seconds < known[0].wall_s
    assert [stats.prompt_s for stats in known[1:]] == [0, 0]


def test_prompts_beside_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the draft model's is not the prompt's; before steps have drafted without one, nothing is known."""
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02))
    engine.telemetry.pace = Pace(PlainTimes((1, 64), (1,), ((1e-3,), (1e-3,))))
    steps = Steps(monkeypatch)
    drafting = Speculation(rule="block", num_drafts=1, draft_length=2)
    known = []
    for number in range(2):
        engine.submit(tiny.request(str(number), [1, 2, 3], drafting, max_tokens=40))
        known.append(engine.run_step().stats)
        assert engine.scheduler.last_plan.has_prefill
        while number == 0 and engine.scheduler.has_work:
            engine.run_step()
    assert known[0].plain_s is None
    assert known[1].plain_s is not None
    told, step = steps.told[-1], steps.steps[-1]
    assert told is not None
    assert known[1].prompt_s == told.prompt_s
    assert step.has_prompts
    assert step.num_nodes == 2
    assert known[1].phases_s["draft"] > 0
    assert 0 < step.seconds < known[1].wall_s - known[1].phases_s["draft"]


def test_what_lies_around_steps_counts_for_both_sides() -> None:
    overhead, stopwatch = Overhead(), Stopwatch()

    def step(started: float, stopped: float, parts_s: float, goes_on: bool = True) -> tuple[float, float]:
        stopwatch.started, stopwatch.stopped, stopwatch.parts_s = started, stopped, parts_s
        return overhead.add(stopwatch, goes_on)

    assert step(0.0, 1.0, 0.9) == (0.0, 0.0)
    before, usual = step(1.2, 2.2, 0.9)
    assert (before, usual) == pytest.approx((0.2, 0.3))
    before, usual = step(9.2, 10.2, 0.9)
    assert before == pytest.approx(7.0)
    assert usual < 0.4, "a long wait is not usual"
    step(10.4, 11.4, 0.9, goes_on=False)
    assert step(99.0, 100.0, 0.9)[0] == 0.0, "waiting for requests is no overhead"
    overhead.pause()
    assert step(199.0, 200.0, 0.9)[0] == 0.0, "nor is what ran meanwhile"


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


def test_what_the_controller_takes_is_not_plain_decodings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain engine has none: otherwise answers would report that speculation gains more, the slower it chooses."""

    def slow(*_: object) -> bool:
        time.sleep(0.02)
        return False

    monkeypatch.setattr(Controller, "_probes", slow)
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02))
    plain = PlainTimes((1,), (1,), ((1e-3,),))
    curve = Curve([(0, 0.0), (9, 0.0)])
    engine.scheduler.controller = Controller(StepCosts(plain, NodeCosts({1: curve}), curve, curve), 3)
    engine.telemetry.pace = Pace(plain)
    adaptive = Speculation(rule="block", num_drafts=1, draft_length=3, adaptive=True)
    engine.submit(tiny.request("0", [1, 2, 3], adaptive, max_tokens=30))
    known = [engine.run_step().stats for _ in range(8)]
    assert all(stats.wall_s > 0.02 for stats in known)
    told = [stats.plain_s for stats in known if stats.plain_s is not None]
    assert len(told) > 4
    assert statistics.median(told) < 0.02


def measured(
    engine: Engine, folder: Path | str, num_drafts: int = 3, draft_window: int = 0
) -> tuple[list[str], object, object]:
    """(what was said, the plain times, the costs' points) of a start."""
    said: list[str] = []
    limits = SpeculationConfig(draft_window=draft_window)
    config = EngineConfig(model=ModelConfig(target="t"), speculation=limits, profile_cache=str(folder))
    speculation = Speculation(rule="bv_race", num_drafts=num_drafts, draft_length=3, adaptive=True)
    plain, costs = measure(engine, config, speculation, said.append)
    assert costs is not None
    return said, plain.seconds, costs.points


@pytest.fixture
def engine() -> Engine:
    target = tiny.llama(seed=1)
    return tiny.build(target, tiny.perturbed(target, 2, 0.02), max_num_seqs=4)


def take(monkeypatch: pytest.MonkeyPatch, *factors: float) -> None:
    """Plain steps take so many times what is kept: of one row, and of a middle number of rows."""

    def steps(engine: Engine, plain: PlainTimes) -> dict[int, float]:
        return dict(zip((plain.num_rows[0], plain.num_rows[len(plain.num_rows) // 2]), factors * 2, strict=False))

    monkeypatch.setattr(calibration, "_factors_now", steps)


@pytest.mark.parametrize(
    ("factors", "why"),
    [
        ((1.3, 1.4), None),
        ((0.6, 0.65), None),
        (
            (0.9, 1.1),
            "by number of requests plain steps have changed differently: 0.90 times as long for 1 at once, 1.10",
        ),
        ((1.4, 1.0), "changed differently: 1.40 times as long for 1 at once, 1.00 times as long for 2 at once"),
        ((3.1, 3.1), "plain steps have changed too much: 3.10 times as long for 1"),
        ((0.3, 0.3), "plain steps have changed too much"),
    ],
)
def test_a_machine_that_is_faster_or_slower_as_a_whole_is_not_measured_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: tuple[float, float], why: str | None
) -> None:
    """One factor corrects that; points that have changed differently are measured again, and the log says why."""
    measured(engine, tmp_path)
    take(monkeypatch, *factors)
    config = EngineConfig(model=ModelConfig(target="t"), profile_cache=str(tmp_path))
    speculation = Speculation(rule="bv_race", num_drafts=3, draft_length=3, adaptive=True)
    said: list[str] = []
    plain, _ = measure(engine, config, speculation, said.append)
    if why is None:
        assert said == ["using the measurements of an earlier start"]
        assert plain.factor == pytest.approx(sum(factors) / 2)
    else:
        assert said[0].startswith("measuring plain decoding (")
        assert why in said[0]
        assert plain.factor == 1


def test_the_points_are_those_that_were_measured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(_: Engine, plans: list[Plan]) -> list[tuple[float, dict[str, float]]]:
        assert [(len(plan.rows), plan.rows[0].end) for plan in plans] == [(1, 33), (2, 33)]
        return [(0.2, {}), (0.9, {})]

    monkeypatch.setattr(calibration, "middle_steps", steps)
    plain = PlainTimes((1, 2, 4), (33, 99), ((0.1, 0.2), (0.3, 0.4), (0.5, 0.6)))
    assert calibration._factors_now(engine, plain) == pytest.approx({1: 2.0, 2: 3.0})


def test_the_next_start_uses_what_was_measured(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "there"
    _, *first = measured(engine, folder)
    take(monkeypatch, 1.0)
    said, *second = measured(engine, folder)
    assert said == ["using the measurements of an earlier start"]
    assert second == first
    # Another shape is another measurement, and another window.
    assert "measuring" in measured(engine, folder, num_drafts=2)[0][0]
    assert "measuring" in measured(engine, folder, draft_window=64)[0][0]


def test_measurements_that_do_not_hold_any_more_are_made_again(engine: Engine, tmp_path: Path) -> None:
    measured(engine, tmp_path)
    (file,) = tmp_path.iterdir()
    kept = file.read_text()
    empty = '{"plain": null, "costs": null}'
    for spoilt in (kept.replace("0.0", "77.0"), "{", "[]", "", empty, empty.replace("null", "[[], [], []]"), '"plain"'):
        file.write_text(spoilt)
        assert "measuring" in measured(engine, tmp_path)[0][0]
        assert max(max(row) for row in read_kept(file)["plain"][2]) < 60


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a line in the log."""
    (tmp_path / "file").write_text("")
    said, *_ = measured(engine, tmp_path / "file")
    assert "measuring plain decoding (there are no measurements of this pair" in said[0]
    assert f"measurements cannot be kept in {tmp_path / 'file'} (File exists)" in said[-1]
    assert "--profile-cache" in said[-1]
    assert [line for line in measured(engine, "off")[0] if "%" not in line] == [
        "measuring plain decoding (nothing is kept, as --profile-cache says)",
        "measuring speculative steps",
    ]

    def nobody(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    said, *_ = measured(engine, "~/somewhere")
    assert said[0].startswith("measurements cannot be kept (Could not determine home directory.)")
    assert "measuring" in said[1]


class FakeSteps:
    """An engine whose steps take as long as their plan says, three times that while the machine is busy."""

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


def test_plans_are_measured_in_turns() -> None:
    """A busy time meets a part of every plan's runs, which their middle halves leave out."""
    plans: Any = [0.001, 0.002, 0.003]
    for busy in (range(12), range(20, 32), range(48, 60)):
        engine: Any = FakeSteps(busy)
        assert [wall_s for wall_s, _ in middle_steps(engine, plans)] == pytest.approx(plans)
    # Slow steps are timed three times only, behind one that is not; the middle one counts, and its phases with it.
    engine = FakeSteps(range(2))
    assert middle_steps(engine, [0.2]) == [(pytest.approx(0.2), {"draft": pytest.approx(0.1)})]
    assert engine.num_runs == 4
    # The wrong variant measures one plan after the other.
    apart: list[float] = []
    engine = FakeSteps(range(20))
    for plan in plans:
        apart.append(middle_steps(engine, [plan])[0][0])
    assert apart[0] > 2 * 0.001
    assert apart[1:] == pytest.approx([0.002, 0.003])


def test_costs_are_those_of_the_steps_they_were_measured_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each part of a step grows in proportion, so do the costs; reading is measured as a pass of many rows."""
    text_s, node_text_s, pass_text_s = 1e-4, 1e-5, 2e-5

    def draft_s(plan: Plan) -> float:
        passes = [sum(max(1, len(row.draft_known)) for row in plan.rows if row.draft_known)]
        passes += [sum(row.widths[depth] for row in plan.rows) for depth in range(plan.rows[0].draft_length - 1)]
        longer = pass_text_s * len(plan.rows) * (plan.rows[0].end - 33) if plan.rows[0].branching else 0.0
        return sum(0.01 + 0.001 * num_rows + longer for num_rows in passes if num_rows)

    def steps(_: Engine, plans: list[Plan], _tell: Any) -> list[tuple[float, dict[str, float]]]:
        nodes = [sum(row.num_nodes for row in plan.rows) for plan in plans]
        other = [
            0.1 + 0.01 * len(plan.rows) + (0.002 if len(plan.rows) > 1 else 0.001) * count
            for plan, count in zip(plans, nodes, strict=True)
        ]
        behind = [
            text_s * sum(row.end for row in plan.rows) + node_text_s * count * (plan.rows[0].end - 33)
            for plan, count in zip(plans, nodes, strict=True)
        ]
        every = zip(map(sum, zip(other, behind, strict=True)), plans, strict=True)
        return [(s + draft_s(plan), {"draft": draft_s(plan)}) for s, plan in every]

    target = tiny.llama(seed=1)
    draft = tiny.perturbed(target, 2, 0.02)
    monkeypatch.setattr(calibration, "_CONTEXTS", (32, 99))
    monkeypatch.setattr(calibration, "_TEXT", 32)
    engine = tiny.build(target, draft, max_num_seqs=16, num_blocks=512)
    monkeypatch.setattr(calibration, "middle_steps", steps)
    speculation = Speculation(rule="bv_race", num_drafts=4, draft_length=5, adaptive=True)
    costs = calibration.measure_costs(engine, speculation, measure_plain(engine))
    assert costs.step_s(4, 0, (), 400) == pytest.approx(0.14 + 400 * text_s)
    usual_s = 0.14 + 0.048 + 0.014 + 2 * 0.018
    assert costs.step_s(4, 4, (8, 8, 8), 132) == pytest.approx(usual_s + 132 * text_s)
    longer_s = 4000 * text_s + (1000 - 33) * (24 * node_text_s + 3 * 4 * pass_text_s)
    assert costs.step_s(4, 4, (8, 8, 8), 4000) == pytest.approx(usual_s + longer_s)
    # A request's own nodes cost half as much where it is alone, and two requests lie a third of the way to four.
    assert costs.step_s(1, 1, (1,) * 5, 33) == pytest.approx(0.11 + 0.005 + 5 * 0.011 + 33 * text_s)
    assert costs.nodes.at(2, 6) == pytest.approx(6 * (0.001 + 0.001 / 3))
    assert costs.nodes.at(64, 6) == pytest.approx(0.012)
    assert costs.reading.at(100) == pytest.approx(0.1)
    assert costs.reading.at(4000) == pytest.approx(4.0)
    # As they are written and read again; and of a draft model that sees no more than a window.
    assert StepCosts.of(json.loads(json.dumps(costs.points)), costs.plain).points == costs.points
    windowed = replace(costs, text=replace(costs.text, window=500))
    spared_s = (1000 - 500) * 3 * 4 * pass_text_s
    assert windowed.step_s(4, 4, (8, 8, 8), 4000) == pytest.approx(usual_s + longer_s - spared_s)

    assert {1, 3, 5, 12} <= set(costs.nodes.of_rows[1].sizes)
    assert 64 in costs.draft_pass.sizes


def test_shorter_texts_take_no_less_than_nothing() -> None:
    text = TextCosts(100, 0.01, 0.01)
    plain, nodes = PlainTimes((1,), (1,), ((1.0,),)), NodeCosts({1: Curve([(0, 0.0), (9, 0.9)])})
    costs = StepCosts(plain, nodes, Curve([(1, 0.5)]), Curve([(0, 0.0)]), text)
    assert costs.step_s(1, 1, (1,), 100) == pytest.approx(1.6)
    assert costs.step_s(1, 1, (1,), 95) == pytest.approx(1.5)
    assert costs.step_s(1, 1, (1,), 2) == pytest.approx(1.0)


def test_texts_that_models_do_not_take_add_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 tokens, of which half is the usual text: a longer one would be no twice as long.

    And where it is not known what longer texts add to plain steps, drafts alone would seem dear behind them.
    """
    speculation = Speculation(rule="bv_race", num_drafts=4, draft_length=3)
    known, unknown = PlainTimes((1,), (1, 200), ((1.0, 2.0),)), PlainTimes((1,), (33,), ((1.0,),))
    assert calibration.measure_costs(engine, speculation, known).text == TextCosts(65)
    monkeypatch.setattr(calibration, "_TEXT", 32)
    assert calibration.measure_costs(engine, speculation, unknown).text == TextCosts()
    assert calibration.measure_costs(engine, speculation, known).text.behind == 33


def test_longer_texts_within_a_small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests with four chains of three do not fit into 32 rows, behind longer texts either."""
    monkeypatch.setattr(calibration, "_TEXT", 32)
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02), budget=32)
    speculation = Speculation(rule="bv_race", num_drafts=4, draft_length=3)
    points = calibration._points(engine, speculation, 32)
    assert {point for point in points if point.context > 32} == {(4, 0, 0, 123), (4, 1, 3, 123)}
    assert calibration.measure_costs(engine, speculation, PlainTimes((1,), (1, 200), ((1.0, 2.0),))).text.behind == 33


@pytest.mark.parametrize("window", [0, 500, 300, 100])
def test_passes_read_no_more_than_a_window(window: int) -> None:
    """The slope is that of the tokens which are seen, so that it does not depend on the window."""
    point, measured = calibration._Point, {}
    for context in (256, 1024):
        draft_s = 3 * 4 * 1e-6 * min(context + 1, window or 9999)
        plain_s = 1.0 + 4 * 1e-4 * context
        measured[point(4, 0, 0, context)] = calibration._Measured(plain_s, {"draft": 0.0})
        for num_drafts in (1, 4):
            nodes_s = 12 * num_drafts * 1e-5 * context
            step = calibration._Measured(plain_s + nodes_s + draft_s, {"draft": draft_s})
            measured[point(4, num_drafts, 3, context)] = step
    plain = PlainTimes((4,), (257, 1025), ((1.1, 1.4),))
    found = calibration._text_costs(measured, 256, plain, window)
    assert (found.behind, found.window) == (257, window)
    assert found.node_s == pytest.approx(1e-5)
    assert found.pass_s == pytest.approx(1e-6 if window != 100 else 0.0)
    assert found.of_passes(4, 3, 257 + 100) == pytest.approx(
        12e-6 * (min(357, window or 357) - min(257, window or 257))
    )
    # Nodes cost no more than a row that reads a text alone, whatever was measured.
    measured[point(4, 4, 3, 1024)] = calibration._Measured(9.0, {"draft": draft_s})
    assert calibration._text_costs(measured, 256, plain, window).node_s == pytest.approx(1e-4)
