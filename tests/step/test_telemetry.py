"""Times of steps and of their phases."""

from __future__ import annotations

import time

import pytest

from engine.step.telemetry import Stopwatch
from tests.engine import tiny


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
    """The host waits for the device while it reads the verdict."""
    device = LateDevice({0: 0.001, 1: 0.03, 2: 0.002}, last_is_done=False)
    stopwatch = Stopwatch(device)
    stopwatch.start()
    with stopwatch.phase("target"):
        pass
    with stopwatch.phase("verify"):
        time.sleep(0.04)  # waits for the target's pass
    with stopwatch.phase("keep"):
        pass
    wall_s, phases_s = stopwatch.stop()
    assert (phases_s["target"], phases_s["verify"]) == pytest.approx((0.001, 0.03))
    assert phases_s["keep"] != pytest.approx(0.002), "what the device has not come to counts as the host saw it"
    assert wall_s >= 0.04
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
