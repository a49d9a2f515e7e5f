"""The speedup that steps report, on a simulated clock with a known plain time."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Abort, encode
from engine.control import step_time
from engine.control.arms import COLD_STEPS
from engine.control.step_time import StepTimes
from engine.control.step_work import PLAIN
from engine.fanout import Fanout
from engine.process import Loop
from engine.request import Speculation
from engine.scheduling.outcome import Timing
from engine.scheduling.store import root_key
from engine.step.idle import IdleSteps, lacking_plain
from engine.step.results import BROKEN
from tests.control.test_step_time import CHAIN, Served
from tests.engine import tiny
from tests.scheduling.machine import Machine, Server
from tests.server.step_results import outcome, stats
from tests.wrong import instead

MACHINE = Machine(noise=0.05, prompt_s=0.0003, read_s=5e-5)


def true_and_reported(num_requests: int, times: float = 1.0) -> tuple[float, float]:
    """Return (true, reported) speedup of a fixed shape, with plain steps from the start."""
    load: tuple[Any, ...] = (0.75, num_requests, 20, 30)
    plain = Server(replace(MACHINE, times=times), *load, fixed=PLAIN).rate(800)
    server = Server(replace(MACHINE), *load, fixed=PLAIN)
    server.run(40)
    server.fixed = (1, 3)
    server.run(40)
    server.machine.times = times
    server.timing = Timing()
    rate = server.rate(800)
    assert server.timing.speedup is not None
    return rate / plain, server.timing.speedup


@pytest.mark.parametrize(("num_requests", "times"), [(1, 1.0), (4, 1.0), (1, 3.0)])
def test_requests_of_a_fixed_shape_report_their_speedup(num_requests: int, times: float) -> None:
    true, reported = true_and_reported(num_requests, times)
    assert reported == pytest.approx(true, rel=0.08)


def test_reports_are_right_on_a_machine_whose_speed_wanders() -> None:
    """It changes by a third within seconds, because others compute on the same processor."""
    errors = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        server = Server(replace(MACHINE), 0.75, num_prompt=20)
        speed, plain_s, began = 0.0, 0.0, 0.0
        for number in range(1500):
            if number == 400:
                server.timing, plain_s, began = Timing(), 0.0, server.machine.now
            times = server.machine.times = float(np.exp(speed))
            speed = 0.99 * speed + 0.045 * random.normal()
            num_before = server.num_tokens
            work = server.step()
            plain_s += times * MACHINE.prompt_s * work.prompt
            plain_s += times * (MACHINE.base_s + MACHINE.row_s) * (server.num_tokens - num_before)
        assert server.timing.speedup is not None
        errors.append(server.timing.speedup * (server.machine.now - began) / plain_s)

    assert np.mean(errors) == pytest.approx(1, abs=0.04)
    assert np.std(errors) < 0.06


def test_plain_steps_as_they_were_measured_at_start_would_be_wrong() -> None:
    """The wrong variant does not follow the pace of the machine."""

    def as_at_start(observe: Any, times: StepTimes, work: Any, wall_s: float, *more: Any) -> Any:
        plain = observe(times, work, wall_s, *more)
        fixed_s = times.prices.plain_s(work.rows) if work.rows else 0.0
        return step_time.PlainTimes(fixed_s, fixed_s, plain.prompt_s)

    with instead(StepTimes, "observe", as_at_start):
        true, reported = true_and_reported(1, 3.0)
    assert reported < 0.7 * true


STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from([0, 3, 100]), st.floats(0.0, 0.1)), min_size=1, max_size=40)


@given(steps=STEPS, times=st.sampled_from([0.02, 1.0, 20.0]))
def test_speedup_is_at_most_one_without_accepted_drafts(steps: list[tuple[bool, int, float]], times: float) -> None:
    """No draft was accepted, and the machine is not as it was at start."""
    served = Served()
    served.machine.times = times
    timing = Timing()
    for drafts, prompt, delay_s in steps:
        fanout: Fanout = CHAIN if drafts else ()
        served.machine.base_s = 0.009 + delay_s
        plain, seconds = served.step(fanout, prompt=prompt, read=prompt * drafts)
        timed = stats(seconds, plain.plain_s, prompt_s=plain.prompt_s)
        timing.add(msgspec.structs.replace(timed, usual_plain_s=plain.usual_plain_s), outcome(1, 0))
    assert timing.speedup is None or 0 < timing.speedup <= 1 + 1e-9


def test_an_engine_hands_over_the_steps_before_the_first_token() -> None:
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02), budget=32)
    engine.scheduler.times = StepTimes(Machine().prices())
    block = Speculation(rule="block", num_drafts=1, draft_length=2)
    engine.submit(tiny.request("0", tiny.prompts(101, [70])[0], block, max_tokens=9))
    steps = []
    while not (step := engine.run_step()).outcomes:
        steps.append(step.stats)
    assert len(steps) == 2
    (first,) = step.outcomes
    taken_s, plain_s = first.reading_s
    assert taken_s == pytest.approx(sum(stats.wall_s for stats in steps))
    assert plain_s == pytest.approx(sum(stats.wall_s - stats.phases_s["draft"] for stats in steps))
    assert engine.run_step().outcomes[0].reading_s == (0, 0)


def test_a_request_may_fail_while_its_prompt_is_read() -> None:
    """Its grammar's process may be killed in any step; the others of the step go on."""
    engine = tiny.build(tiny.llama(seed=1), None, budget=32)
    engine.scheduler.times = StepTimes(Machine().prices())
    engine.submit(*[tiny.request(name, tiny.prompts(101, [length])[0]) for name, length in (("0", 9), ("1", 70))])
    with instead(engine.grammar_queue, "failed", lambda *_: [("1", BROKEN)]):
        step = engine.run_step()
    assert [outcome.request_id for outcome in step.outcomes] == ["0"]
    assert step.failed == [("1", BROKEN)]
    assert step.stats.num_running == 1


# -- plain steps of an idle engine -----------------------------------------------------------------


def idle_engine(**more: Any) -> tuple[Any, Any]:
    """Return an engine that has served requests of a fixed shape, and its answers."""
    target = tiny.llama(seed=1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.02), **more)
    engine.scheduler.times = StepTimes(Machine(base_s=1e-3).prices())
    chains = Speculation(rule="block", num_drafts=1, draft_length=2)
    requests = [tiny.request(str(number), [1, 2, 3], chains, max_tokens=60) for number in range(2)]
    return engine, tiny.run(engine, requests).tokens


def test_an_idle_engine_takes_plain_steps_and_returns_its_blocks() -> None:
    engine, _ = idle_engine()
    times = engine.scheduler.times
    idle = IdleSteps(engine)
    assert idle.are_due
    assert not times.bucket(2).is_measured
    for _ in range(100):
        if not idle.are_due:
            break
        idle.take()
    assert times.bucket(2).is_measured
    assert not idle.are_due
    engine.scheduler.check_invariants()
    assert engine.stats().num_running == 0


def test_a_request_ends_the_plain_steps_of_an_idle_engine() -> None:
    engine, before = idle_engine()
    idle = IdleSteps(engine)
    idle._begin()
    assert engine.scheduler.tables.target.num_used > 0
    idle.end()
    engine.scheduler.check_invariants()
    chains = Speculation(rule="block", num_drafts=1, draft_length=2)
    requests = [tiny.request(str(number), [1, 2, 3], chains, max_tokens=60) for number in range(2)]
    assert tiny.run(engine, requests).tokens == before


def test_blocks_that_an_idle_engine_borrows_are_not_reported() -> None:
    """No step follows the end of the last request, so its report stays."""
    engine, _ = idle_engine()
    sent: list[Any] = []
    abort = encode(Abort("waits"))
    loop = Loop(engine, SimpleNamespace(receive=lambda _: [abort], send=sent.append))  # type: ignore[arg-type]
    engine.grammar_queue.add(tiny.request("waits", [1], grammar="{}"))
    loop.idle._begin()
    assert engine.stats().num_blocks_used > 0
    assert loop.read()
    (report,) = sent
    assert report.stats.num_blocks_used == 0


def test_an_idle_engine_without_free_blocks_takes_no_steps() -> None:
    engine, _ = idle_engine(num_blocks=20)
    store = engine.scheduler.tables.target
    held = store.allocate(store.num_free)
    idle = IdleSteps(engine)
    idle.take()
    assert not idle.are_due, "it would ask again and again"
    store.release(held)


def test_an_idle_engine_evicts_no_cached_texts() -> None:
    engine, _ = idle_engine(num_blocks=20)
    store = engine.scheduler.tables.target
    keys = [root_key(str(number)) for number in range(store.num_empty)]
    blocks = store.allocate(store.num_empty)
    for block, key in zip(blocks, keys, strict=True):
        store.publish(block, key, has_draft_kv=False)
    store.release(blocks)
    IdleSteps(engine).take()
    assert all(store.take_cached([key])[0] for key in keys)


@pytest.mark.parametrize("between_s", [0.0, 0.003])
def test_an_idle_engine_measures_what_fixed_shapes_cannot(between_s: float) -> None:
    """Plain decoding would have sent its messages, too; an idle engine sends none."""
    served = Served()
    served.between_s = between_s
    served.run(CHAIN)
    bucket = lacking_plain(served.times, served.machine.now)
    assert bucket is not None
    bucket.idle_s = served.machine.now
    for _ in range(COLD_STEPS + 8):
        served.machine.now += served.plain_s()
        served.times.observe_idle(bucket, served.plain_s(), served.machine.now)
    assert lacking_plain(served.times, served.machine.now) is None, "no draft has come since"
    assert served.run(CHAIN).plain_s == pytest.approx(served.plain_s() + between_s, rel=0.01)
    assert lacking_plain(served.times, bucket.idle_s + 0.1) is None, "it was measured just now"
    assert lacking_plain(served.times, bucket.idle_s + 11) is bucket
    assert lacking_plain(served.times, served.machine.now + 100) is None, "nothing has happened for long"
