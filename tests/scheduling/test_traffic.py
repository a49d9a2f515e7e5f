"""The scheduler under any traffic: accounting, no starvation, complete answers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.config import SchedulerConfig
from engine.control.step_time import StepTimes
from engine.plan import Plan, StatePlaces
from engine.request import Speculation
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.rows import PlannedRow
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.states import SequenceStates, StateStore
from engine.scheduling.store import BlockStore
from tests.scheduling.machine import Machine
from tests.scheduling.test_scheduler import BLOCK_SIZE, Whims, build, request, verdict
from tests.wrong import calls_of, instead


class Contents:
    """Contents of a pool's slots: the text up to the token whose K/V was computed there last."""

    def __init__(self) -> None:
        self.text_of: dict[int, tuple[int, ...]] = {}

    def compute(self, blocks: Many[int], text: Many[int], first: int, end: int) -> None:
        for index in range(first, end):
            self.text_of[self.slot(blocks, index)] = tuple(text[: index + 1])

    def write_nodes(self, blocks: Many[int], first: int, count: int) -> None:
        for index in range(first, first + count):
            self.text_of.pop(self.slot(blocks, index), None)

    def check(self, blocks: Many[int], text: Many[int], first: int, end: int) -> None:
        for index in range(first, end):
            text_there = self.text_of.get(self.slot(blocks, index))
            assert text_there == tuple(text[: index + 1]), "K/V of something else is read"

    @staticmethod
    def slot(blocks: Many[int], index: int) -> int:
        return blocks[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE


class StateContents:
    """Texts of a model's states by place, and accepted nodes by seat."""

    def __init__(self) -> None:
        self.text_at: dict[int, tuple[int, ...]] = {-1: ()}
        self.accepted: dict[int, list[int]] = {}

    def read(self, places: StatePlaces | None, text: Many[int], first: int, end: int) -> None:
        """Read a text from index `first` to `end` in the next pass, as the next row of the pass."""
        if places is None:
            return
        assert self.text_at[places.source] == tuple(text[: places.covered]), "the state of another text is read"
        repeated = self.accepted.pop(places.seat, []) if places.source == places.seat else []
        assert list(text[places.covered : first]) == repeated[: first - places.covered], "inputs are lost"
        for stop, place in ((end, places.seat), *places.kept):
            self.text_at[place] = tuple(text[:stop])


class Traffic(RuleBasedStateMachine):
    """Requests come, are aborted, and steps accept anything."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = recurrent()
        self.target_contents, self.draft_contents = Contents(), Contents()
        self.target_states, self.draft_states = StateContents(), StateContents()
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
            self.target_contents.compute(row.block_ids, text + accepted, row.end, row.end + len(accepted))
            if row.state is not None and row.draft_state is not None:
                self.target_states.accepted[row.state.seat] = accepted
                if row.fanout:
                    self.draft_states.accepted[row.draft_state.seat] = accepted[: row.draft_length - 1]
            # The draft model never computes the last tokens of chains.
            self.draft_contents.write_nodes(row.draft_table, row.end, row.num_drafts * (row.draft_length - 1))
            if accepted:
                kept = min(len(accepted), row.draft_length - 1)
                self.draft_contents.compute(row.draft_table, text + accepted, row.end, row.end + kept)
        for outcome in self.scheduler.commit(plan, verdict(plan, accept, token, keeps=True)):
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
            self.target_contents.compute(row.block_ids, text, row.first_index, row.end)
            self.draft_contents.compute(row.draft_table, text, row.draft_first_index, end)
            self.target_states.read(row.state, text, row.first_index, row.end)
            if row.draft_input_ids:
                self.draft_states.read(row.draft_state, text, row.draft_first_index, end)
        for row, text, end in zip(plan.rows, texts, ends, strict=True):
            self.target_contents.check(row.block_ids, text, 0, row.first_index)
            if row.draft_input_ids:
                self.draft_contents.check(row.draft_table, text, row.first_draft_key, end)

    @invariant()
    def accounting_holds(self) -> None:
        self.scheduler.check_invariants()

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.remaining:
                break
            self.step(2, 7)
        assert not self.remaining, "a request never ended"
        assert self.scheduler.tables.target.num_used == 0
        assert self.scheduler.tables.draft is None or self.scheduler.tables.draft.num_used == 0


def recurrent(num_cached: int = 3) -> Scheduler:
    """A scheduler of two models with recurrent layers."""
    scheduler = build()
    seats, cached = range(4), range(4, 4 + num_cached)
    stores = [StateStore(seats, cached) for _ in ("target", "draft")]
    tables = BlockTables(scheduler.tables.target, None, *stores)
    return Scheduler(scheduler.config, tables, frozenset({99}))


class SlowPrompts(Traffic):
    """The same on a machine that reads prompts a few tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler.times = StepTimes(Machine(prompt_s=1.0).prices())


TestSlowPrompts = pytest.mark.slow(SlowPrompts.TestCase)


TestSlowPrompts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


TestTraffic = pytest.mark.sole("random traffic of the scheduler")(Traffic.TestCase)


TestTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


WINDOW = 6


def windowed(window: int = WINDOW) -> Scheduler:
    """A scheduler with draft blocks for one whole text, and not for four windows."""
    config = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=4)
    target, draft = BlockStore(24, BLOCK_SIZE), BlockStore(15, BLOCK_SIZE)
    return Scheduler(config, BlockTables(target, draft), frozenset({99}), draft_window=window)


class AdaptiveTraffic(Traffic):
    """The same where requests draft differently at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.whims = Whims()
        self.scheduler.controller = self.whims

    @rule(num_drafts=st.integers(0, 3), draft_length=st.integers(1, 4), beside=st.booleans())
    def choose(self, num_drafts: int, draft_length: int, beside: bool) -> None:
        self.whims.tell(num_drafts, draft_length, beside)

    def speculation(self, drafts: int, draft_length: int) -> Speculation:
        return Speculation(num_drafts=drafts, draft_length=draft_length, adaptive=drafts > 0)


TestAdaptiveTraffic = pytest.mark.slow(AdaptiveTraffic.TestCase)


TestAdaptiveTraffic.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


class WindowedTraffic(Traffic):
    """The same with a draft window, whose blocks are released and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = windowed()

    @rule(length=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def submit_unwindowed(self, length: int, max_tokens: int) -> None:
        """A request of a rule that changes later targets."""
        name = str(self.next_name)
        self.next_name += 1
        self.scheduler.submit(request(name, length, max_tokens, 1, 4), fixed_draft_distribution=True)
        self.remaining[name] = max_tokens


TestWindowedTraffic = pytest.mark.slow(WindowedTraffic.TestCase)


TestWindowedTraffic.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


class AdaptiveWindowedTraffic(AdaptiveTraffic):
    """A draft window that is shorter than what a step may emit, and drafts that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = windowed(2)
        self.scheduler.controller = self.whims


TestAdaptiveWindowedTraffic = pytest.mark.slow(AdaptiveWindowedTraffic.TestCase)


TestAdaptiveWindowedTraffic.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def long_answers() -> WindowedTraffic:
    traffic = WindowedTraffic()
    for number in range(6):
        traffic.submit(4 * number + 9, max_tokens=24, drafts=1 + number % 2, draft_length=3, priority=0)
    for _ in range(16):
        traffic.step(1, 7)
    traffic.teardown()
    return traffic


def test_a_released_block_of_the_draft_model_is_never_read() -> None:
    """The wrong variant releases a block of the window."""
    long_answers()
    with (
        instead(PlannedRow, "first_draft_key", lambda right, part: right(part) + BLOCK_SIZE),
        pytest.raises(AssertionError, match="K/V of something else"),
    ):
        long_answers()


def test_a_window_holds_its_own_blocks_only() -> None:
    """Plain requests hold none."""
    traffic = WindowedTraffic()
    traffic.submit(20, max_tokens=12, drafts=1, draft_length=3, priority=0)
    traffic.submit(20, max_tokens=12, drafts=0, draft_length=0, priority=0)
    draft = traffic.scheduler.tables.draft
    assert draft is not None
    seen = []
    for _ in range(10):
        traffic.step(0, 7)
        seen.append(draft.num_used)
    assert max(seen) == -(-(WINDOW + 3 - 1) // BLOCK_SIZE) + 1 == 3
    assert traffic.scheduler.tables.target.num_used > 2 * max(seen)


def test_a_request_without_draft_blocks_is_not_preempted_for_some() -> None:
    """Two whole texts outgrow the draft pool next to plain requests."""
    traffic = WindowedTraffic()
    traffic.submit_unwindowed(20, max_tokens=12)
    traffic.submit_unwindowed(20, max_tokens=12)
    for _ in range(4):
        traffic.step(0, 7)
    traffic.submit(3, max_tokens=12, drafts=0, draft_length=0, priority=0)
    with calls_of(Scheduler, "_preempt") as calls:
        traffic.teardown()
    victims = [operands[1] for operands, _ in calls]
    assert victims
    assert all(one.request.speculation.num_drafts for one in victims)


def test_a_block_that_leaves_the_window_in_the_step_that_fills_it_is_not_shared() -> None:
    """A step emits more tokens than the window has."""
    for length in range(9, 13):
        scheduler = windowed(2)
        scheduler.submit(request("a", length, max_tokens=30, drafts=1, draft_length=4))
        while scheduler.has_work:
            scheduler.commit(plan := scheduler.plan(), verdict(plan, 4, keeps=True))
            scheduler.check_invariants()


def test_the_draft_model_finds_the_window_of_an_earlier_text() -> None:
    """The draft model computes what is new alone."""
    scheduler = windowed()
    scheduler.submit(request("first", 20, 8, drafts=1, draft_length=2))
    tokens = list(range(20))
    while scheduler.has_work:
        for outcome in scheduler.commit(plan := scheduler.plan(), verdict(plan, 1, keeps=True)):
            tokens += outcome.token_ids
    again = msgspec.structs.replace(request("again", 1, 4, drafts=1, draft_length=2), prompt_token_ids=(*tokens, 5))
    scheduler.submit(again)
    row = scheduler.plan().rows[0]
    assert (row.first_index, row.draft_first_index, row.draft_kv_first, row.end) == (24, 24, 20, 29)


def test_published_blocks_of_an_answer_of_one_token_are_computed() -> None:
    """A request with the same beginning drafts after its prompt."""
    traffic = AdaptiveTraffic()
    traffic.choose(1, 1, beside=True)
    for length in (4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1):
        traffic.submit(length, max_tokens=1 + length % BLOCK_SIZE, drafts=1, draft_length=1, priority=0)
    traffic.step(0, 7)
    traffic.teardown()


def shared_prompts() -> Traffic:
    """Answers after prompts that begin alike, one by one and together, in few places."""
    traffic = Traffic()
    traffic.scheduler = recurrent(2)
    for length in (13, 22, 22, 9):
        for _ in range(2):
            traffic.submit(length, max_tokens=9, drafts=2, draft_length=3, priority=0)
        for accept in (2, 0, 3):
            traffic.step(accept, 7)
    traffic.teardown()
    return traffic


def same_place(_right: Callable[..., int], store: StateStore, _replaced: Any) -> int:
    """A wrong variant: all cached states have one place."""
    return store.cached[0]


def late(right: Callable[..., None], store: StateStore, states: SequenceStates, covered: int) -> None:
    """A wrong variant: a state is taken for that of a token before it."""
    right(store, states, covered - 1)


@pytest.mark.parametrize(("name", "variant"), [("_take", same_place), ("advance", late)])
def test_states_and_inputs_are_those_of_the_text(name: str, variant: Callable[..., None]) -> None:
    states = shared_prompts().scheduler.tables.states
    assert states is not None
    assert states.num_hits > 4
    assert states.num_evicted > 0
    with instead(StateStore, name, variant), pytest.raises(AssertionError):
        shared_prompts()


def test_third_text_starts_where_the_second_left_the_first() -> None:
    """States are cached where a prompt ends, and where a text leaves another one."""
    scheduler = recurrent(4)
    beginning = tuple(range(2 * BLOCK_SIZE + 1))
    cached = []
    for number in range(4):
        prompt = (*beginning, *[100 * min(number, 2)] * (2 * BLOCK_SIZE))
        asked = request(str(number), len(prompt), 3 * BLOCK_SIZE)
        scheduler.submit(msgspec.structs.replace(asked, prompt_token_ids=prompt))
        while scheduler.has_work:
            plan = scheduler.plan()
            outcomes = scheduler.commit(plan, verdict(plan))
        cached.append(outcomes[0].num_cached)
    assert cached == [0, 0, 2 * BLOCK_SIZE, 4 * BLOCK_SIZE]
    assert scheduler.tables.states is not None
    assert scheduler.tables.states.num_evicted > 0
    assert scheduler.tables.states.num_used == 4
