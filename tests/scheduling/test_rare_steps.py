"""Steps with rows larger than their part of the budget, or with preemption."""

from __future__ import annotations

import msgspec

from engine.config import SchedulerConfig
from engine.plan import Plan
from engine.request import Speculation
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.prompts import PromptLimit
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.store import BlockStore
from tests.scheduling.test_prompts import Formula
from tests.scheduling.test_scheduler import BLOCK_SIZE, Whims, build, request, verdict
from tests.wrong import calls_of


def step(scheduler: Scheduler) -> Plan:
    """Run one step, in which no draft is accepted."""
    plan = scheduler.plan()
    scheduler.commit(plan, verdict(plan))
    return plan


def test_a_quarter_is_left_for_prompts_after_a_row_that_is_larger_than_the_rest() -> None:
    scheduler = build(budget=300, num_blocks=1024, max_num_seqs=64)
    scheduler.submit(request("wide", 1, 40, drafts=16, draft_length=16))
    for number in range(43):
        scheduler.submit(request(f"plain {number}", 1, 40, first=1000 * (number + 1)))
    assert len(step(scheduler).sampling_rows) == 44
    scheduler.submit(request("prompt", 200, 4, first=100_000))
    rows = [(row.request_id, row.num_known + row.num_nodes) for row in scheduler.plan().rows]
    assert rows == [("wide", 257), ("prompt", 43)]


class Prompts(Whims):
    """Notes whether prompts are read in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def choose(self, adaptive: object, others: object, with_prompts: bool) -> None:
        self.seen.append(with_prompts)
        super().choose(adaptive, others, with_prompts)


def test_a_preempted_row_is_neither_a_prompt_nor_a_decoding_row() -> None:
    """The first row of the step is preempted for the second; a third request waits for blocks."""
    scheduler = build(budget=64, num_blocks=4, max_num_seqs=3)
    scheduler.controller = prompts = Prompts()
    scheduler.times = Formula()
    for name, length, first in (("little", 3, 0), ("much", 6, 50), ("waits", 12, 100)):
        scheduler.submit(request(name, length, 7, first=first))
    step(scheduler)
    prompts.seen.clear()
    with calls_of(PromptLimit, "__init__") as limits:
        while not scheduler.num_preemptions:
            plan = step(scheduler)
    assert [row.request_id for row in plan.rows] == ["much"]
    assert prompts.seen[-1] == 0
    assert limits[-1].operands[-2:] == (1, plan.rows[0].end)


def test_a_preempted_prompt_takes_no_time_of_the_step() -> None:
    """The first prompt takes the draft model's block that the second holds."""
    config = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_prompt_tokens=16)
    tables = BlockTables(BlockStore(256, BLOCK_SIZE), BlockStore(3, BLOCK_SIZE))
    scheduler = Scheduler(config, tables, frozenset({99}), draft_window=8)
    scheduler.times = Formula()
    scheduler.submit(request("decodes", 4, 100, first=5000))
    step(scheduler)
    for name, length, first in (("first", 40, 0), ("second", 20, 1000)):
        scheduler.submit(request(name, length, 4, drafts=1, draft_length=2, first=first))
    with calls_of(PromptLimit, "take") as taken:
        while not scheduler.num_preemptions:
            taken.clear()
            plan = step(scheduler)
    assert [row.request_id for row in plan.rows] == ["decodes", "first"]
    assert [call.operands[-1] for call in taken] == [plan.rows[1].num_known]


def test_the_draft_model_must_read_a_cached_prefix_without_its_keys() -> None:
    """An adaptive request takes the whole prefix that a plain request has left."""
    scheduler = build(budget=64, num_blocks=64)
    scheduler.submit(request("plain", 21, 1))
    step(scheduler)
    scheduler.controller = whims = Whims()
    whims.tell(2, 2)
    speculation = Speculation(num_drafts=2, draft_length=2, adaptive=True)
    scheduler.submit(msgspec.structs.replace(request("adaptive", 21, 8), speculation=speculation))
    step(scheduler)
    sequence = next(iter(scheduler._running.values()))
    assert sequence.num_cached == 20
    assert scheduler.draft_prefill.to_read(sequence) == 21
