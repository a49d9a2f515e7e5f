"""What plain decoding would take now is told by the steps of an engine that makes few plain ones."""

from __future__ import annotations

import numpy as np
import pytest

from engine import levels, pace
from engine.metrics import PlainTimes
from engine.pace import Pace, Step


class Machine:
    """Makes steps one after the other, and tells a pace."""

    def __init__(self, plain_s: float = 0.010) -> None:
        self.pace = Pace(PlainTimes((1,), (1,), ((plain_s,),)))
        self._clock = 0.0

    def step(self, seconds: float, num_rows: int = 1, num_nodes: int = 0, has_prompts: bool = False) -> float | None:
        """One that took so long; what its prompts took."""
        told = self.pace.add(Step(self._clock, seconds, num_rows, 1.0, num_nodes, has_prompts, is_behind=False))
        self._clock += seconds
        return told and told.prompt_s

    @property
    def plain_ms(self) -> float:
        """What a plain step takes now, as it seems."""
        return 1e3 * self.pace.plain.step_s(1, 1) * self.pace._levels.times([(0, 0)])


def test_a_prompts_time_is_what_a_step_has_beyond_the_usual() -> None:
    """Plain steps of 10 ms, drafting ones take 1.5 times as long without their drafts, large ones three times."""
    machine = Machine()

    def of_prompt(seconds: float, num_rows: int, num_nodes: int) -> float | None:
        return machine.step(seconds, num_rows, num_nodes, has_prompts=True)

    assert of_prompt(0.030, 1, 3) is None
    assert of_prompt(0.030, 1, 0) == pytest.approx(0.020), "plain steps are known from the start"
    assert machine.step(0.900, 1, 3) == 0  # the first has something to warm up
    assert of_prompt(0.030, 1, 3) is None
    for _ in range(60):
        assert machine.step(0.015, 1, 3) == 0
        assert machine.step(0.030, 16, 48) == 0
    near = 0.0005
    assert of_prompt(0.040, 1, 3) == pytest.approx(0.025, abs=near)
    assert of_prompt(0.040, 15, 45) == pytest.approx(0.010, abs=near), "while one of sixteen reads, fifteen draft"
    assert of_prompt(0.040, 16, 42) == pytest.approx(0.010, abs=near), "or fourteen of sixteen"
    assert of_prompt(0.040, 11, 33) == pytest.approx(0.010, abs=near), "the nearest size that is known"
    assert of_prompt(0.040, 4, 12) is None
    assert of_prompt(0.040, 16, 80) is None
    assert of_prompt(0.013, 1, 3) == pytest.approx(-0.002, abs=near), "noise is not cut off at one side"
    machine.step(9.0, 1, 3)
    assert of_prompt(0.040, 1, 3) == pytest.approx(0.025, abs=0.002), "one slow step is no rule"


def test_one_of_many_that_drafts_is_no_plain_step() -> None:
    machine = Machine()
    for _ in range(30):
        machine.step(0.030, 16, 3)
    assert machine.step(0.010, 16, 0, has_prompts=True) == pytest.approx(0, abs=0.001)


def test_plain_steps_correct_what_was_measured() -> None:
    machine = Machine()
    for _ in range(400):
        machine.step(0.012)
    assert machine.plain_ms == pytest.approx(12, rel=0.01)
    machine.step(9.0)
    assert machine.plain_ms < 13, "one slow step is no rule"


def test_a_plain_step_behind_others_says_nothing() -> None:
    """It finds other weights in the caches; neither do steps with prompts."""
    machine = Machine()
    machine.step(0.020)
    machine.step(0.090, has_prompts=True)
    machine.step(0.020)
    assert machine.plain_ms == 10
    machine.step(0.020)
    assert machine.plain_ms > 10


@pytest.mark.parametrize("follows", [True, False])
def test_drafting_steps_tell_that_the_machine_is_slower_now(follows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slower machine is seen without a plain step; what only drafting takes more, plain steps tell apart."""
    if not follows:
        monkeypatch.setattr(levels, "_WANDERS", 0.0)
    machine, noise = Machine(), np.random.default_rng(1)

    def serve(times: float, drafts: float, num_steps: int, probes: bool = True) -> float:
        """Where plain steps take 12 ms so many times, and drafting ones so many times as long."""
        plain_ms = []
        for number in range(num_steps):
            seconds = 0.012 * times * noise.lognormal(-0.005, 0.1)
            is_plain = probes and number % 256 < 3
            machine.step(seconds if is_plain else seconds * drafts, num_nodes=0 if is_plain else 3)
            plain_ms.append(machine.plain_ms)
        return float(np.mean(plain_ms[num_steps // 2 :]))

    before = serve(1.0, 1.5, 12 * 256)
    assert before == pytest.approx(12, rel=0.05), "plain steps were measured too fast"
    slower = serve(1.3, 1.5, 1500, probes=False)
    assert (slower / before == pytest.approx(1.3, rel=0.05)) is follows
    if follows:
        assert serve(1.3, 1.8, 60 * 256) == pytest.approx(12 * 1.3, rel=0.06), "only drafting steps are slower"


def test_what_is_seen_in_a_row_is_about_the_machine() -> None:
    """A machine that gets slower while nothing is drafted has not made drafting steps cheaper."""
    machine = Machine()
    for _ in range(100):
        machine.step(0.010)
        machine.step(0.010)
        machine.step(0.020, num_nodes=3)
    for _ in range(400):
        machine.step(0.015)
    assert machine.plain_ms == pytest.approx(15, rel=0.05)
    for _ in range(40):
        machine.step(0.030, num_nodes=3)
    assert machine.plain_ms == pytest.approx(15, rel=0.05)


def test_only_so_many_sizes_are_known() -> None:
    """The one met longest ago gives its place away; others keep what is known of them."""
    machine = Machine()
    for _ in range(40):
        machine.step(0.015, num_nodes=1)
    for num_nodes in range(2, 200):
        for _ in range(4):
            machine.step(0.020, num_nodes=num_nodes)
        machine.step(0.015, num_nodes=1)
    assert len(machine.pace._levels._state) <= 65
    assert machine.step(0.030, 1, 1, has_prompts=True) == pytest.approx(0.015, abs=0.001)
    assert machine.step(0.030, 1, 199, has_prompts=True) == pytest.approx(0.010, abs=0.003)
    assert machine.step(0.030, 1, 20, has_prompts=True) is None
    assert np.linalg.eigvalsh(machine.pace._levels._variance).min() > 0


def test_what_is_known_of_drafting_steps_lasts() -> None:
    """Hours without a plain step say little of the machine, and all of what such steps take."""
    machine = Machine()
    for _ in range(4 * 3600):
        machine.step(1.0, num_nodes=3)
    assert machine.step(1.5, 1, 3, has_prompts=True) == pytest.approx(0.5, abs=0.01)


def test_what_was_seen_long_ago_is_believed_no_less_than_nothing() -> None:
    """Days later a size is as uncertain as a new one, not more."""
    machine = Machine(1.0)
    for _ in range(50):
        machine.step(1.5, num_nodes=3)
    for _ in range(20_000):
        machine.step(20.0, num_nodes=9)
    known = machine.pace._levels._variance[machine.pace._levels._places[0, 3], machine.pace._levels._places[0, 3]]
    assert 0.9 * pace._DRAFTING < known < 1.01 * pace._DRAFTING
