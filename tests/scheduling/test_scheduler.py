"""Decisions of the scheduler: budgets, queue, preemption, draft windows."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import PROMPT_LOOKUP, SchedulerConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.control.step_work import PLAIN
from engine.plan import Emission, Plan, StepVerdict
from engine.request import Limits, Request, Speculation
from engine.scheduling.block_tables import BlockTables
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


def verdict(plan: Plan, accept: int = 0, token: int = 7, keeps: bool = False) -> StepVerdict:
    """Accept up to `accept` tokens in every row; keeps: the draft model has their K/V."""
    emissions = []
    for row in plan.sampling_rows:
        count = min(accept, row.draft_length)
        kept = min(count, row.draft_length - 1) if keeps and row.fanout else 0
        emissions.append(Emission(tuple([token] * count), token, row.num_drafts * row.draft_length, kept))
    return StepVerdict(tuple(emissions))


class Whims(Controller):
    """A controller with scripted choices."""

    def __init__(self) -> None:
        super().__init__(StepTimes(Machine().prices()), 16)
        self.told = PLAIN
        self.beside = True

    def tell(self, num_drafts: int, draft_length: int, beside: bool = True) -> None:
        self.beside = beside
        self.shape = self.told = (num_drafts, draft_length) if num_drafts else PLAIN
        self.reads = num_drafts > 0

    def choose(self, adaptive: object, others: object, with_prompts: bool) -> None:
        self.shape = self.told if self.beside or not with_prompts else PLAIN


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
    """A step for the prompt alone would be wasted."""
    scheduler = build(budget=64, num_blocks=64)
    scheduler.times = StepTimes(Machine().prices())
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


def test_short_prompt_shares_a_step_with_a_long_one() -> None:
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
    """Two prompts of 16k are being computed while a request decodes."""
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


def test_lagging_draft_model_does_not_block_the_queue() -> None:
    """Tokens left in a step must do for a cached prefix without draft K/V."""
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


def test_long_prompt_delays_others_by_one_step() -> None:
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


def test_the_sequence_that_loses_least_is_preempted_and_recomputed_first() -> None:
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


@pytest.mark.parametrize(("num_blocks", "num_seats"), [(64, 2), (8, 4)], ids=["seats", "blocks"])
def test_an_urgent_request_takes_the_place_of_a_less_urgent_one(num_blocks: int, num_seats: int) -> None:
    """The other one goes on with its text later, before requests that are as urgent as it is."""
    scheduler = build(budget=64, num_blocks=num_blocks, max_num_seqs=num_seats)
    for number, name in enumerate(("line 0", "line 1")):
        scheduler.submit(request(name, 12, 6, priority=5, first=100 * number))
    scheduler.submit(request("line 2", 12, 6, priority=5, first=200))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    scheduler.submit(request("urgent", 12, 4, first=300))
    plan = scheduler.plan()
    assert [row.request_id for row in plan.rows] == ["line 0", "urgent"], "one line, the latest, is preempted"
    outcomes = scheduler.commit(plan, verdict(plan))
    while scheduler.has_work:
        outcomes += scheduler.commit(plan := scheduler.plan(), verdict(plan))
        scheduler.check_invariants()
    assert [outcome.request_id for outcome in outcomes if outcome.finish_reason] == [
        "urgent",
        "line 0",
        "line 1",
        "line 2",
    ]
    num_tokens = sum(len(outcome.token_ids) for outcome in outcomes if outcome.request_id == "line 1")
    assert num_tokens == 5, "its first token is not drawn again"


def test_a_free_seat_is_given_to_one_urgent_request_only() -> None:
    """The second urgent request takes the place of a line."""
    scheduler = build(budget=64, num_blocks=64, max_num_seqs=3)
    for number in range(2):
        scheduler.submit(request(f"line {number}", 12, 6, priority=5, first=100 * number))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    for number in range(2):
        scheduler.submit(request(f"urgent {number}", 12, 4, first=300 + 100 * number))
    assert [row.request_id for row in scheduler.plan().rows] == ["line 0", "urgent 0", "urgent 1"]


def test_a_request_of_the_same_priority_waits() -> None:
    scheduler = build(max_num_seqs=1)
    for name in "ab":
        scheduler.submit(request(name, 3, 4, first=100))
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
    assert [row.request_id for row in plan.rows] == ["a"]
    assert scheduler.num_preemptions == 0


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
    """Return (first draft token, number, start of its K/V) of a lone request."""
    seen = []
    for _ in range(steps):
        plan = scheduler.plan()
        seen += [(row.draft_first_index, len(row.draft_input_ids), row.draft_kv_first) for row in plan.rows]
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


def test_a_text_waits_for_the_draft_blocks_of_its_window_only() -> None:
    tables = BlockTables(BlockStore(64, BLOCK_SIZE), BlockStore(4, BLOCK_SIZE))
    for window, has_blocks in ((8, True), (0, False)):
        sequence = Sequence(1, request("a", 40, 9, drafts=1, draft_length=2), 0.0, draft_window=window)
        assert tables.has_blocks(sequence, 42) == has_blocks


def test_blocks_of_a_preempted_request_are_found_again() -> None:
    """This includes blocks that it computed while no other request waited."""
    scheduler = build(budget=64, num_blocks=9, max_num_seqs=2)
    scheduler.submit(request("much", 3, 40))
    for _ in range(18):
        scheduler.commit(plan := scheduler.plan(), verdict(plan))
    computed = scheduler.running(0).num_target_computed
    scheduler._preempt(scheduler.running(0))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    assert plan.rows[0].first_index == computed // BLOCK_SIZE * BLOCK_SIZE > 0


def run_of_neighbours(speculation: Speculation) -> list[Plan]:
    """Return the steps in which one request and 15 of another client decode."""
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=16, max_drafted_nodes=64)
    scheduler = Scheduler(config, BlockStore(4096, 16), frozenset({99}))
    for number in range(16):
        plain = request(str(number), 5, 200, first=1000 * number)
        client = "neighbour" if number == 15 else "crowd"
        scheduler.submit(msgspec.structs.replace(plain, client=client, speculation=speculation))
    scheduler.commit(plan := scheduler.plan(), verdict(plan))
    plans = []
    for _ in range(12):
        plans.append(scheduler.plan())
        scheduler.commit(plans[-1], verdict(plans[-1]))
        scheduler.check_invariants()
    return plans


def test_fixed_shapes_beyond_the_nodes_of_a_step_wait_and_clients_take_turns() -> None:
    plans = run_of_neighbours(Speculation(num_drafts=4, draft_length=4))
    assert all(sum(row.num_nodes for row in plan.rows) == 64 for plan in plans)
    assert all({row.fanout for row in plan.rows} == {(4, 1, 1, 1)} for plan in plans)
    assert all("15" in {row.request_id for row in plan.rows} for plan in plans)
    assert {row.request_id for plan in plans for row in plan.rows} == set(map(str, range(16)))


def test_adaptive_requests_share_the_nodes_of_a_step_without_measurements() -> None:
    plans = run_of_neighbours(Speculation(num_drafts=4, draft_length=4, adaptive=True))
    assert all(len(plan.rows) == 16 for plan in plans)
    assert all(0 < sum(row.num_nodes for row in plan.rows) <= 64 for plan in plans)


@pytest.mark.parametrize(("node_s", "drafts"), [(None, True), (1e-6, True), (0.1, False)])
def test_the_load_decides_about_text_drafts_of_adaptive_requests(node_s: float | None, drafts: bool) -> None:
    """Once step times are known. Without them, the text alone decides."""
    scheduler = build(budget=64, num_blocks=32)
    scheduler.times = StepTimes(Machine(row_s=node_s).prices()) if node_s is not None else None
    text = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3)
    speculation = Speculation(drafters=(PROMPT_LOOKUP,), adaptive=True)
    scheduler.submit(msgspec.structs.replace(request("a", 3, 40), prompt_token_ids=text, speculation=speculation))
    (row,) = scheduler.plan().rows
    assert [one.tokens[0] for one in row.text_drafts] == [4] * drafts
