"""The scheduler under any traffic: accounting holds, no request starves, every answer is complete."""

from __future__ import annotations

from collections.abc import Sequence as Many

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.config import SchedulerConfig
from engine.control.controller import Controller, ShapeChoice
from engine.control.step_time import StepTimes
from engine.control.step_work import PLAIN
from engine.plan import Emission, Plan, Row, StepVerdict
from engine.request import Limits, Request, Speculation
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.store import BlockStore
from tests.scheduling.machine import Machine

BLOCK_SIZE = 4


def build(budget: int = 24, num_blocks: int = 16, max_num_seqs: int = 4) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    return Scheduler(config, BlockStore(num_blocks, BLOCK_SIZE), frozenset({99}))


def request(
    name: str, length: int, max_tokens: int, drafts: int = 0, draft_length: int = 0, priority: int = 0, first: int = 0
) -> Request:
    return Request(
        request_id=name,
        priority=priority,
        prompt_token_ids=tuple(range(first, first + length)),
        limits=Limits(max_tokens=max_tokens),
        speculation=Speculation(num_drafts=drafts, draft_length=draft_length),
    )


def verdict(plan: Plan, accept: int = 0, token: int = 7) -> StepVerdict:
    """Every sampling row accepts up to `accept` drafted tokens."""
    emissions = []
    for row in plan.sampling_rows:
        count = min(accept, row.draft_length)
        emissions.append(Emission(tuple([token] * count), token, row.num_drafts * row.draft_length))
    return StepVerdict(tuple(emissions))


class Contents:
    """Contents of a pool's slots: the text up to the token whose K/V was computed there last."""

    def __init__(self) -> None:
        self.text_of: dict[int, tuple[int, ...]] = {}

    def compute(self, row: Row, text: Many[int], first: int, end: int) -> None:
        for index in range(first, end):
            self.text_of[self.slot(row, index)] = tuple(text[: index + 1])

    def check(self, row: Row, text: Many[int], first: int, end: int) -> None:
        for index in range(first, end):
            assert self.text_of.get(self.slot(row, index)) == tuple(text[: index + 1]), "K/V of something else is read"

    @staticmethod
    def slot(row: Row, index: int) -> int:
        return row.block_ids[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE


class Traffic(RuleBasedStateMachine):
    """Requests come, are aborted, and steps accept anything; the model is a count per request, and what slots hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = build()
        self.of_target, self.of_draft = Contents(), Contents()
        self.remaining: dict[str, int] = {}
        self.next_name = 0

    @rule(
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        drafts=st.integers(0, 3),
        draft_length=st.integers(1, 4),
        priority=st.integers(-1, 1),
    )
    def submit(self, length: int, max_tokens: int, drafts: int, draft_length: int, priority: int) -> None:
        name = str(self.next_name)
        self.next_name += 1
        asked = request(name, length, max_tokens, priority=priority)
        speculation = self.speculation(drafts, draft_length if drafts else 0)
        self.scheduler.submit(msgspec.structs.replace(asked, speculation=speculation))
        self.remaining[name] = max_tokens

    def speculation(self, drafts: int, draft_length: int) -> Speculation:
        return Speculation(num_drafts=drafts, draft_length=draft_length)

    @precondition(lambda self: self.remaining)
    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        name = sorted(self.remaining)[index % len(self.remaining)]
        assert self.scheduler.abort(name)
        del self.remaining[name]

    @rule(accept=st.integers(0, 4), token=st.sampled_from([7, 7, 7, 99]))
    def step(self, accept: int, token: int) -> None:
        plan = self.scheduler.plan()
        assert sum(row.num_tokens for row in plan.rows) <= self.scheduler.config.max_num_batched_tokens
        assert bool(plan.rows) == bool(self.remaining), "work waits and no row was planned"
        for row in plan.rows:
            assert row.input_ids
            capacity = len(row.block_ids) * BLOCK_SIZE
            assert capacity >= row.end + row.num_drafts * row.draft_length
        self.compute(plan)
        texts = [list(self.scheduler.running(row.sequence_id).tokens) for row in plan.rows]
        for row, text in zip(plan.rows, texts, strict=True):
            accepted = [token] * min(accept, row.draft_length) if row.emits else []
            self.of_target.compute(row, text + accepted, row.end, row.end + len(accepted))
        for outcome in self.scheduler.commit(plan, verdict(plan, accept, token)):
            assert outcome.token_ids
            self.remaining[outcome.request_id] -= len(outcome.token_ids)
            left = self.remaining[outcome.request_id]
            assert left >= 0
            if outcome.finish_reason is None:
                assert left > 0
            else:
                assert outcome.finish_reason == ("stop" if token == 99 else "length")
                del self.remaining[outcome.request_id]

    def compute(self, plan: Plan) -> None:
        """A pass writes all K/V, then it reads."""
        texts = [self.scheduler.running(row.sequence_id).tokens for row in plan.rows]
        ends = [row.draft_first_index + len(row.draft_input_ids) for row in plan.rows]
        for row, text, end in zip(plan.rows, texts, ends, strict=True):
            self.of_target.compute(row, text, row.first_index, row.end)
            self.of_draft.compute(row, text, row.draft_first_index, end)
        for row, text, end in zip(plan.rows, texts, ends, strict=True):
            self.of_target.check(row, text, 0, row.first_index)
            if row.draft_input_ids:
                self.of_draft.check(row, text, row.draft_start, end)

    @invariant()
    def accounting_holds(self) -> None:
        self.scheduler.check_invariants()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.remaining:
                break
            self.step(2, 7)
        assert not self.remaining, "a request never ended"
        assert self.scheduler.blocks.num_used == 0


class SlowPrompts(Traffic):
    """The same on a machine without time for prompts while others decode: each is read a few tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler.times = StepTimes(Machine(prompt_s=1.0).points())


TestSlowPrompts = SlowPrompts.TestCase
TestSlowPrompts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Whims(Controller):
    """A controller with scripted choices."""

    def __init__(self) -> None:
        super().__init__(StepTimes(Machine().points()), 16)

    def tell(self, num_drafts: int, draft_length: int) -> None:
        self.choice = ShapeChoice((num_drafts, draft_length) if num_drafts else PLAIN)
        self.reads = num_drafts > 0

    def choose(self, *_: object) -> None:
        """Decide nothing."""


class AdaptiveTraffic(Traffic):
    """The same where what requests draft changes at any time, and with it what the draft model has to catch up on."""

    def __init__(self) -> None:
        super().__init__()
        self.whims = Whims()
        self.scheduler.controller = self.whims

    @rule(num_drafts=st.integers(0, 3), draft_length=st.integers(1, 4))
    def choose(self, num_drafts: int, draft_length: int) -> None:
        self.whims.tell(num_drafts, draft_length)

    def speculation(self, drafts: int, draft_length: int) -> Speculation:
        return Speculation(num_drafts=drafts, draft_length=draft_length, adaptive=drafts > 0)


TestAdaptiveTraffic = AdaptiveTraffic.TestCase
TestAdaptiveTraffic.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_what_is_published_of_an_answer_of_one_token_is_computed() -> None:
    """Nothing is drafted for it, even if a shape is chosen; a request with the same beginning drafts after its
    prompt.
    """
    traffic = AdaptiveTraffic()
    traffic.choose(1, 1)
    for length in (4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1):
        traffic.submit(length, max_tokens=1 + length % BLOCK_SIZE, drafts=1, draft_length=1, priority=0)
    traffic.step(0, 7)
    traffic.teardown()


def is_behind(plan: Plan) -> bool:
    """Whether the draft model computes more than the last step emitted, or a text from which nothing is drafted."""
    return any(
        len(row.draft_input_ids) > max(2, len(row.input_ids)) or (row.draft_input_ids and not row.fanout)
        for row in plan.rows
    )


def test_prompts_are_read_by_the_draft_model_where_something_is_drafted() -> None:
    """If that changes, it catches up with near texts at once, and with far ones piece by piece while they decode.
    The wrong variant never drafts for the latter again.
    """
    config = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=4)
    scheduler, whims = Scheduler(config, BlockStore(256, BLOCK_SIZE), frozenset({99})), Whims()
    scheduler.controller = whims
    whims.tell(0, 0)
    for name, length in (("short", 20), ("long", 300), ("middle", 171)):
        asked = request(name, length, 50, first=1000 * length)
        speculation = Speculation(num_drafts=2, draft_length=2, adaptive=True)
        scheduler.submit(msgspec.structs.replace(asked, speculation=speculation))
    plan = scheduler.plan()
    assert [len(row.input_ids) for row in plan.rows] == [20, 300, 171]
    assert not any(row.draft_input_ids for row in plan.rows)
    scheduler.commit(plan, verdict(plan))
    whims.tell(2, 2)
    read = []
    while True:
        plan = scheduler.plan()
        assert all(row.emits for row in plan.rows)
        assert is_behind(plan)
        short, middle, long = sorted(plan.rows, key=lambda row: row.end)
        read.append(tuple((len(row.draft_input_ids), bool(row.fanout)) for row in (short, middle, long)))
        assert short.fanout
        scheduler.commit(plan, verdict(plan))
        if long.fanout:
            break
    # 64 tokens a step are caught up on together; who is no further behind than its part drafts at once.
    assert read[0] == ((21, True), (22, False), (22, False))
    assert read[1] == ((1, True), (33, False), (33, False))
    assert all(sum(num_read for num_read, _ in step) <= 64 + 3 for step in read)
    drafts = [tuple(drafting for _, drafting in step) for step in read]
    assert drafts == sorted(drafts), "who drafts goes on"
    assert (True, True, False) in drafts
    assert not is_behind(scheduler.plan())


class Noting(Whims):
    """Notes how many requests each choice is for."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen_for: list[int] = []

    def choose(self, adaptive: Many[Sequence], *_: object) -> None:
        self.chosen_for.append(len(adaptive))


@pytest.mark.parametrize(
    ("length", "num_blocks", "max_num_seqs", "foreseen"),
    [(12, 64, 4, 3), (60, 64, 4, 2), (12, 5, 4, 2), (12, 64, 2, 2)],
    ids=["ends", "too long for a step", "too few blocks", "no seat"],
)
def test_shapes_are_chosen_for_those_too_whose_prompts_end(
    length: int, num_blocks: int, max_num_seqs: int, foreseen: int
) -> None:
    """Two decode, one waits: it is a row of this step and the next where its prompt fits the step. The wrong variant
    chooses for two wherever answers end and begin."""
    scheduler = build(budget=48, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    scheduler.controller = noting = Noting()
    speculation = Speculation(num_drafts=1, draft_length=1, adaptive=True)
    for name, num_tokens in (("one", 6), ("two", 6), ("comes", length)):
        asked = request(name, num_tokens, 20, first=100 * len(name))
        scheduler.submit(msgspec.structs.replace(asked, speculation=speculation))
        if name != "one":
            plan = scheduler.plan()
            scheduler.commit(plan, verdict(plan))
    assert noting.chosen_for == [2, foreseen]
    assert len(scheduler.last_plan.sampling_rows) == foreseen


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ((6, 6, 6, 6), {}),
        ((100, 6, 6, 6), {}),
        ((50, 60, 6, 6), {}),
        ((10, 10, 10, 10), {}),
        ((90, 8, 8, 8), {"priority": -1}),
        ((90, 8, 8, 8), {"num_prompt_logprobs": 1}),
    ],
    ids=["idle", "long", "two long", "too many", "urgent", "logprobs"],
)
def test_shapes_are_chosen_for_exactly_those_that_emit(lengths: tuple[int, ...], changes: dict[str, int]) -> None:
    """Cases: prompts without a limit, because no request decodes; with long prompts, which leave the others their
    share, or are more urgent and leave nothing, or take several steps for their logprobs; and more rows than fit a
    step.
    """
    config = SchedulerConfig(max_num_batched_tokens=100, max_prompt_tokens=16, max_num_seqs=8)
    scheduler = Scheduler(config, BlockStore(256, BLOCK_SIZE), frozenset({99}))
    scheduler.controller = noting = Noting()
    speculation = Speculation(num_drafts=1, draft_length=1, adaptive=True)
    emitting = []
    for step in range(14):
        for number in range(4 * step, 4 * step + 4) if step in (0, 4) else ():
            asked = request(str(number), lengths[number % 4], 60, first=1000 * number)
            asked = msgspec.structs.replace(asked, speculation=speculation, **changes if number % 4 == 0 else {})
            scheduler.submit(asked)
        plan = scheduler.plan()
        emitting.append(len(plan.sampling_rows))
        scheduler.commit(plan, verdict(plan))
    assert noting.chosen_for == emitting


def test_a_long_prompt_rides_along_in_chunks() -> None:
    """Decoding goes on in every step while a long prompt is computed."""
    scheduler = build(budget=16, num_blocks=64)
    scheduler.submit(request("short", 3, 40))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("long", 70, 4))
    for _ in range(4):
        plan = scheduler.plan()
        assert [row.emits for row in plan.rows] == [True, False]
        assert sum(row.num_tokens for row in plan.rows) <= 16
        scheduler.commit(plan, verdict(plan))


def test_a_prompt_that_fits_the_time_is_followed_by_its_drafts_at_once() -> None:
    """Also while others decode: the limit is one of prompts, and a step for the prompt alone would be wasted."""
    scheduler = build(budget=64, num_blocks=64)
    scheduler.times = StepTimes(Machine().points())
    scheduler.submit(request("decodes", 4, 20, drafts=1, draft_length=3))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("reads", 20, 20, drafts=1, draft_length=3, first=1000))
    assert [(row.request_id, len(row.input_ids), row.fanout) for row in scheduler.plan().rows] == [
        ("decodes", 1, (1, 1, 1)),
        ("reads", 20, (1, 1, 1)),
    ]


def test_rows_that_do_not_fit_the_budget_take_turns() -> None:
    """Shapes never shrink under load; rows wait for the next step, longest-waiting first."""
    scheduler = build(budget=12, num_blocks=64, max_num_seqs=4)
    for name in "abcd":
        scheduler.submit(request(name, 1, 30, drafts=1, draft_length=4))
    served: list[list[int]] = []
    for _ in range(12):
        plan = scheduler.plan()
        assert all(row.draft_length == 4 for row in plan.sampling_rows)
        served.append([row.sequence_id for row in plan.sampling_rows])
        scheduler.commit(plan, verdict(plan))
    assert {i for ids in served[:4] for i in ids} == {0, 1, 2, 3}, "somebody was not admitted"
    counts = [sum(ids.count(i) for ids in served[4:]) for i in range(4)]
    assert max(counts) - min(counts) <= 1


def test_a_short_prompt_is_computed_beside_a_long_one() -> None:
    """The wrong variant serves prompts one after the other: the short one waits for 20 steps."""
    scheduler = build(budget=16, num_blocks=256)
    scheduler.submit(request("long", 300, 4))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("short", 10, 4, first=1000))
    steps = 0
    while not any(row.emits and row.end == 10 for row in plan.rows):
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
        assert any(not row.emits for row in plan.rows), "the long prompt stands still"
        steps += 1
    assert steps <= 3


def test_a_short_prompt_does_not_wait_for_several_long_ones() -> None:
    """With the numbers of a server on a CPU: two prompts of 16k are being computed while a request decodes."""
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=8, max_prompt_tokens=512)
    scheduler = Scheduler(config, BlockStore(8192, 16), frozenset({99}))
    scheduler.submit(request("decodes", 20, 500, first=500_000))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    for name, first in (("long", 0), ("longer", 100_000)):
        scheduler.submit(request(name, 16_384, 4, drafts=4, draft_length=5, first=first))
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("short", 20, 4, first=900_000))
    answered: set[str] = set()
    for _ in range(3):
        plan = scheduler.plan()
        assert sum(not row.emits for row in plan.rows) == 2, "a long prompt stands still"
        answered |= {outcome.request_id for outcome in scheduler.commit(plan, verdict(plan))}
    assert "short" in answered, "the short prompt waits"


def test_a_small_limit_of_prompt_tokens_holds_beside_a_cached_prefix() -> None:
    """The draft model lags behind a prefix that a request without drafts has left."""
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=4, max_prompt_tokens=40)
    for window in (0, 500):
        scheduler = Scheduler(config, BlockStore(1024, 16), frozenset({99}), draft_window=window)
        scheduler.submit(request("decodes", 20, 5000, first=500_000))
        scheduler.submit(request("first", 3000, 1))
        while scheduler.num_running != 1 or scheduler.num_waiting:
            scheduler.commit(plan := scheduler.plan(), verdict(plan))
        scheduler.submit(request("again", 3000, 2, drafts=2, draft_length=2))
        ended = False
        for _ in range(200):
            plan = scheduler.plan()
            assert sum(len(row.input_ids) for row in plan.rows if len(row.input_ids) > 1) <= 40
            ended = ended or any(o.request_id == "again" for o in scheduler.commit(plan, verdict(plan)))
        assert ended, "the request was never served"


def test_a_lagging_draft_model_holds_no_queue_up() -> None:
    """Many decode with many nodes; what is left of a step must do for a cached prefix without draft K/V."""
    config = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=32)
    scheduler = Scheduler(config, BlockStore(2048, 16), frozenset({99}), draft_window=128)
    scheduler.submit(request("first", 1000, 1))
    while scheduler.has_work:
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
    for i in range(12):
        scheduler.submit(request(str(i), 5, 1000, drafts=4, draft_length=4, first=10_000 * (i + 1)))
    for _ in range(6):
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("again", 1000, 2, drafts=4, draft_length=4))
    scheduler.submit(request("behind", 5, 2, first=900_000))
    ended: set[str] = set()
    for _ in range(100):
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
        ended |= {"again", "behind"} - set(scheduler._sequence_ids)
    assert ended == {"again", "behind"}


def test_prompt_tokens_are_limited_while_others_decode() -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_prompt_tokens=10)
    scheduler = Scheduler(config, BlockStore(256, BLOCK_SIZE), frozenset({99}))
    scheduler.submit(request("alone", 100, 40))
    assert [len(row.input_ids) for row in scheduler.plan().rows] == [64]
    scheduler.commit(scheduler.last_plan, verdict(scheduler.last_plan))
    while not scheduler.last_plan.sampling_rows:
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("beside", 100, 4, first=1000))
    assert sorted(len(row.input_ids) for row in scheduler.plan().rows) == [1, 10]


def test_a_prompt_of_16k_holds_nobody_up_for_more_than_a_step() -> None:
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=8, max_prompt_tokens=512)
    scheduler = Scheduler(config, BlockStore(4096, 16), frozenset({99}))
    for i in range(4):
        scheduler.submit(request(f"short{i}", 20, 500, drafts=4, draft_length=5, first=100_000 * (i + 1)))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("long", 16_384, 4))
    for _ in range(16_384 // 512):
        plan = scheduler.plan()
        assert len(plan.sampling_rows) >= 4, "somebody waits for the long prompt"
        assert sum(len(row.input_ids) for row in plan.rows if not row.emits) <= 512
        scheduler.commit(plan, verdict(plan))


def test_who_loses_least_is_preempted_and_recomputed_first() -> None:
    scheduler = build(budget=64, num_blocks=4, max_num_seqs=3)
    for name, length, first in (("little", 3, 0), ("much", 6, 50)):
        scheduler.submit(request(name, length, 7, first=first))
    preempted_after = None
    ended = []
    for step in range(40):
        plan = scheduler.plan()
        for outcome in scheduler.commit(plan, verdict(plan)):
            if outcome.finish_reason:
                ended.append(outcome.request_id)
        if scheduler.num_preemptions and preempted_after is None:
            preempted_after = step
            assert [scheduler.running(row.sequence_id).request.request_id for row in plan.rows] == ["much"]
    assert preempted_after is not None
    assert ended == ["much", "little"]


def test_the_queue_is_served_by_priority_then_by_arrival() -> None:
    scheduler = build(budget=64, max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5)):
        scheduler.submit(request(name, 2, 1, priority=priority))
    ended = []
    while scheduler.has_work:
        plan = scheduler.plan()
        ended += [outcome.request_id for outcome in scheduler.commit(plan, verdict(plan))]
    assert ended == ["d", "a", "c", "b", "e"]


def test_the_least_urgent_is_preempted_first() -> None:
    scheduler = build(budget=64, num_blocks=4, max_num_seqs=3)
    scheduler.submit(request("early", 5, 9, priority=1))
    scheduler.submit(request("late", 5, 9))
    ended = []
    for _ in range(60):
        plan = scheduler.plan()
        ended += [o.request_id for o in scheduler.commit(plan, verdict(plan)) if o.finish_reason]
    assert scheduler.num_preemptions > 0
    assert ended == ["late", "early"]


def test_the_draft_length_leaves_room_for_one_more_token() -> None:
    scheduler = build(budget=64)
    scheduler.submit(request("a", 2, 3, drafts=2, draft_length=4))
    plan = scheduler.plan()
    assert (plan.rows[0].num_drafts, plan.rows[0].draft_length) == (2, 2)
    outcome = scheduler.commit(plan, verdict(plan, accept=2))[0]
    assert outcome.finish_reason == "length"
    assert len(outcome.token_ids) == 3


def test_accepted_counts_after_the_cut() -> None:
    """An end token inside an accepted run ends the answer there, and only kept drafts count."""
    scheduler = build(budget=64)
    scheduler.submit(request("a", 2, 20, drafts=1, draft_length=3))
    plan = scheduler.plan()
    outcome = scheduler.commit(plan, StepVerdict((Emission((5, 99, 6), 8, 3),)))[0]
    assert (outcome.token_ids, outcome.finish_reason, outcome.num_accepted) == ([5, 99], "stop", 2)


def test_a_request_cannot_be_submitted_twice() -> None:
    scheduler = build()
    scheduler.submit(request("a", 2, 3))
    with pytest.raises(AssertionError):
        scheduler.submit(request("a", 2, 3))


def drafted(scheduler: Scheduler, steps: int) -> list[tuple[int, int, int]]:
    """(index of the first token that the draft model computes, how many, where its K/V begins) of a lone request."""
    seen = []
    for _ in range(steps):
        plan = scheduler.plan()
        seen += [(row.draft_first_index, len(row.draft_input_ids), row.draft_start) for row in plan.rows]
        scheduler.commit(plan, verdict(plan))
    return seen


def test_the_draft_model_computes_no_more_of_a_prompt_than_it_sees() -> None:
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4)
    scheduler = Scheduler(config, BlockStore(64, BLOCK_SIZE), frozenset({99}), draft_window=10)
    scheduler.submit(request("a", 40, 9, drafts=1, draft_length=2))
    assert drafted(scheduler, 4) == [(0, 0, 0), (30, 2, 30), (32, 8, 30), (40, 1, 30)]
    # Blocks of which the draft model has nothing are shared as such.
    while scheduler.has_work:
        drafted(scheduler, 1)
    scheduler.submit(request("b", 40, 9, drafts=1, draft_length=2))
    assert drafted(scheduler, 1) == [(30, 10, 30)]
    assert scheduler.num_cache_hits == 32, "as much as the draft model can catch up on in a quarter of a step"


def test_what_a_preempted_request_has_computed_is_found_again() -> None:
    """This includes blocks that it computed while no other request waited."""
    scheduler = build(budget=64, num_blocks=9, max_num_seqs=2)
    scheduler.submit(request("much", 3, 40))
    for _ in range(18):
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
    computed = scheduler.running(0).num_target_computed
    scheduler._preempt(scheduler.running(0))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    assert plan.rows[0].first_index == computed // BLOCK_SIZE * BLOCK_SIZE > 0
