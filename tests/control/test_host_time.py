"""Host time of plain and of drafting steps, on a simulated machine whose times are known."""

from __future__ import annotations

import numpy as np
import pytest

from engine.control import host_time
from engine.control.host_time import HostTime
from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from tests.scheduling.machine import Machine, chains
from tests.wrong import instead

DRAFTING = 1.6
"""Factor of the machine below; not the one that is believed at first."""


def plain(rows: int) -> StepWork:
    return StepWork(rows=rows, text=rows)


def true_s(work: StepWork) -> float:
    return (0.00015 + 0.00002 * work.rows) * DRAFTING ** (work.num_drafting / work.rows)


def serve(host: HostTime, work: StepWork, num_steps: int, seed: int = 0) -> None:
    """Steps with noise of which one in fifty waits for something else."""
    random = np.random.default_rng(seed)
    for number in range(num_steps):
        host.observe(work, true_s(work) * random.lognormal(0, 0.1) + (0.01 if number % 50 == 49 else 0.0))


def after_a_start(host: HostTime) -> HostTime:
    """Few plain steps of one request, then drafts of sixteen."""
    serve(host, plain(1), 32)
    serve(host, chains(1, (1, 3)), 32, seed=1)
    serve(host, chains(16, (1, 3)), 300, seed=2)
    return host


def test_a_contrast_of_one_request_holds_for_many_which_never_decode_plainly() -> None:
    host = after_a_start(HostTime())
    for work in (plain(16), chains(16, (1, 3))):
        assert host.usual_s(work) == pytest.approx(true_s(work), rel=0.1)


def test_one_time_for_all_steps_is_found_wrong() -> None:
    with instead(host_time, "_slopes", lambda *_: np.array([1.0, 0.0])):
        assert after_a_start(HostTime()).usual_s(plain(16)) > 1.4 * true_s(plain(16))


def test_steps_in_which_some_requests_draft_lie_between() -> None:
    host = after_a_start(HostTime())
    partly_drafting = StepWork(rows=16, text=16, nodes=12, num_drafting=4, passes=(4, 4, 4))
    assert host.usual_s(plain(16)) < host.usual_s(partly_drafting) < host.usual_s(chains(16, (1, 3)))
    assert host.usual_s(partly_drafting) == pytest.approx(true_s(partly_drafting), rel=0.1)


def test_prompts_hardly_count_because_requests_are_admitted_then() -> None:
    host = HostTime()
    serve(host, plain(1), 50)
    before_s = host.usual_s(plain(1))
    for _ in range(3):
        host.observe(StepWork(rows=1, text=1, prompt=64), 3 * true_s(plain(1)))
    assert host.usual_s(plain(1)) < 1.1 * before_s


def test_a_controller_that_claims_more_than_there_was_changes_nothing() -> None:
    host = HostTime()
    host.observe(plain(1), -1.0)
    assert host.usual_s(plain(1)) == 0


def test_cold_steps_do_not_count() -> None:
    """A single plain step between drafting ones, as at the end of an answer, takes as long around
    it as those.
    """
    times = StepTimes(Machine().points())
    for work, host_s in [(plain(1), 0.0002)] * 60 + [(chains(1, (1, 3)), 0.0003), (plain(1), 0.0003)] * 500:
        times.observe(work, *Machine().parts_s(work), 0.0, host_s)
    assert times.host.usual_s(plain(1)) == pytest.approx(0.0002, rel=0.01)
    works = [plain(1), chains(1, (1, 3))]
    assert times.step_s(works) == pytest.approx([Machine().step_s(work) + times.host.usual_s(work) for work in works])
