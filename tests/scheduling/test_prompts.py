"""Prompts while others decode: a step takes at most twice as long."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import SchedulerConfig
from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.plan import Plan
from engine.scheduling.prompts import PromptLimit, shares_of
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.store import BlockStore
from tests.scheduling.machine import Machine
from tests.scheduling.test_scheduler import request, verdict


class Formula(StepTimes):
    """A machine on which prompt tokens take 0.2 ms, and 0.1 us more for each before."""

    def __init__(self, row_s: float = 0.02) -> None:
        super().__init__(Machine().prices())
        self.row_s = row_s

    def rest_s(self, work: StepWork) -> float:
        return self.row_s * work.rows + 2e-4 * work.prompt + 1e-7 * work.prompt_text


def build(times: StepTimes | None, num_decoding: int = 1) -> Scheduler:
    """A scheduler in which some requests decode."""
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=16, max_prompt_tokens=512)
    scheduler = Scheduler(config, BlockStore(16_384, 16), frozenset({99}))
    for number in range(num_decoding):
        scheduler.submit(request(f"decodes {number}", 4, 5000, first=10_000_000 + 1000 * number))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.times = times
    return scheduler


def prompt_tokens(plan: Plan) -> list[int]:
    return [row.num_tokens for row in plan.rows if not row.emits]


def read(scheduler: Scheduler, name: str) -> list[Plan]:
    """The steps until a request has its first token."""
    plans = []
    while True:
        plans.append(scheduler.plan())
        if name in {outcome.request_id for outcome in scheduler.commit(plans[-1], verdict(plans[-1]))}:
            return plans


@pytest.mark.parametrize(("row_s", "most_s"), [(0.02, 0.12), (0.3, 0.6)])
def test_a_long_prompt_adds_as_much_as_decoding_takes(row_s: float, most_s: float) -> None:
    """The wrong variant, tokens alone, takes 1.7 s behind 32,000 tokens."""
    scheduler = build(times := Formula(row_s))
    scheduler.submit(request("long", 32_000, 4))
    plans = read(scheduler, "long")
    chunks = [prompt_tokens(plan)[0] for plan in plans[:-1]]
    # In the last one its own row is computed too.
    assert max(times.rest_s(StepWork.of(plan)) for plan in plans[:-1]) <= most_s
    # As much as there is time for: a tenth of the step is left over at most, and longer texts get
    # fewer tokens.
    assert all(times.rest_s(StepWork.of(plan)) > 0.9 * most_s for plan in plans[2:-2] if prompt_tokens(plan)[0] < 512)
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert sum(chunks) + plans[-1].rows[-1].num_tokens == 32_000
    plain = build(None)
    plain.submit(request("long", 32_000, 4))
    assert max(times.rest_s(StepWork.of(plan)) for plan in read(plain, "long")) > 1.5


def test_prompts_share_the_time() -> None:
    scheduler = build(times := Formula())
    for number in range(4):
        scheduler.submit(request(f"long {number}", 4000, 4, first=10_000 * number))
    for _ in range(20):
        plan = scheduler.plan()
        assert times.rest_s(StepWork.of(plan)) <= 0.12 + 4 * 8 * (2e-4 + 4000 * 1e-7)
        assert len(plan.sampling_rows) == 1
        assert len(prompt_tokens(plan)) == 4, "a prompt stands still"
        scheduler.commit(plan, verdict(plan))


def test_prompts_alone_are_not_limited() -> None:
    """Nobody waits for the next token."""
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=16, max_prompt_tokens=512)
    scheduler = Scheduler(config, BlockStore(4096, 16), frozenset({99}))
    scheduler.times = Formula()
    scheduler.submit(request("long", 32_000, 4))
    assert prompt_tokens(scheduler.plan()) == [2048]


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_every_prompt_is_read_on_a_machine_that_is_too_slow(num_drafts: int) -> None:
    """Also behind a cached prefix that the draft model has not read."""
    scheduler = build(Formula())
    scheduler.times = times = Formula()
    times.rest_s = lambda work: float(work.rows + 10 * work.prompt)  # type: ignore[method-assign]
    scheduler.submit(request("first", 1000, 1))
    assert len(read(scheduler, "first")) == 125
    asked = request("second", 1009, 4, drafts=num_drafts, draft_length=5 if num_drafts else 0)
    scheduler.submit(asked)
    plans = read(scheduler, "second")
    assert len(plans) < 100
    assert all(len(plan.sampling_rows) >= 1 for plan in plans)


def test_time_is_asked_of_the_work_that_is_planned() -> None:
    """The limit counts what is taken: the second prompt gets what the first has left."""
    limit = PromptLimit(Formula(), 1, 100)
    assert limit.most(0, 2048) == pytest.approx(500, abs=60)
    limit.take(0, 300)
    assert limit.most(0, 2048) == pytest.approx(200, abs=40)
    limit.take(0, 200)
    assert limit.most(50_000, 2048) == 8


def test_adaptive_requests_are_limited_too() -> None:
    scheduler = build(times := Formula())
    asked = request("long", 32_000, 4, drafts=4, draft_length=5)
    scheduler.submit(
        msgspec.structs.replace(asked, speculation=msgspec.structs.replace(asked.speculation, adaptive=True))
    )
    assert max(times.rest_s(StepWork.of(plan)) for plan in read(scheduler, "long")) <= 0.12 + 0.01


class Exact(StepTimes):
    """Half a second a row, and 1/32 of one for a prompt's token: sums without rounding."""

    def __init__(self) -> None:
        super().__init__(Machine().prices())

    def rest_s(self, work: StepWork) -> float:
        return 0.5 * work.rows + work.prompt / 32


def test_the_time_is_used_to_the_last_token() -> None:
    limit = PromptLimit(Exact(), 1, 0)
    assert limit.most(0, 2048) == 16
    assert limit.most(0, 12) == 12
    limit.take(0, 7)
    assert limit.most(0, 2048) == 9
    limit.take(0, 9)
    assert limit.most(0, 2048) == 8, "a few are read in any case"
    assert PromptLimit(Exact(), 3, 0).most(0, 2048) == 48, "as much as decoding takes"


def test_a_token_takes_longer_behind_a_longer_text() -> None:
    """Each of a chunk attends to those before it: in the mean to half of the chunk."""
    for first in (0, 1000, 5000):
        limit = PromptLimit(Formula(), 1, 0)
        limit.take(500, 20)
        taken = 2e-4 * 20 + 1e-7 * 20 * (500 + 10)
        fitting = [n for n in range(1, 1000) if taken + 2e-4 * n + 1e-7 * n * (first + n // 2) <= 0.1]
        assert limit.most(first, 2048) == max(fitting)


def test_prompt_limit_depends_on_decoding_texts() -> None:
    times = Formula()
    times.rest_s = lambda work: 1e-4 * work.text + work.prompt / 1024  # type: ignore[method-assign]
    assert PromptLimit(times, 1, 5000).most(0, 2048) == 512


def test_shares_are_equal_within_a_priority_and_use_what_is_left() -> None:
    """A short prompt leaves its rest to the longer ones, a priority its rest to the next."""
    prompts = [
        Sequence(number, request(str(number), length, 4, priority=priority), 0.0)
        for number, (length, priority) in enumerate([(500, 0), (10, 0), (80, 0), (5, 1), (9, 2), (50, 2)])
    ]
    assert shares_of(prompts, 100, lambda _: 0) == {1: 33, 2: 45, 0: 45, 3: 1, 4: 1, 5: 1}
    assert shares_of(prompts, 1000, lambda _: 0) == {1: 333, 2: 495, 0: 910, 3: 410, 4: 202, 5: 396}
    lags = {3: 7, 1: 20}
    shares = shares_of(prompts, 100, lambda one: lags.get(one.sequence_id, 0))
    assert shares == {1: 33, 2: 45, 0: 45, 3: 8, 4: 1, 5: 1}, "a draft model's lag is read in any case"
