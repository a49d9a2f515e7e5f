"""Rows of a step and the shapes that are chosen for them."""

from __future__ import annotations

from collections.abc import Sequence as Many

import msgspec
import pytest

from engine.config import SchedulerConfig
from engine.plan import Plan
from engine.request import Speculation
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.store import BlockStore
from tests.scheduling.test_scheduler import BLOCK_SIZE, Whims, build, request, verdict


def is_behind(plan: Plan) -> bool:
    """Return whether the draft model computes more than the last step emitted."""
    return any(
        len(row.draft_input_ids) > max(2, len(row.input_ids)) or (row.draft_input_ids and not row.fanout)
        for row in plan.rows
    )


def test_draft_model_reads_prompts_of_drafting_requests() -> None:
    """If that changes, it catches up: near texts at once, far ones piece by piece."""
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
    # 64 tokens a step are caught up on together; who is no further behind than its part drafts at
    # once.
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
def test_shapes_include_requests_whose_prompts_end(
    length: int, num_blocks: int, max_num_seqs: int, foreseen: int
) -> None:
    """The wrong variant chooses for two wherever answers end and begin."""
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
def test_shapes_are_chosen_for_emitting_requests(lengths: tuple[int, ...], changes: dict[str, int]) -> None:
    """Prompts with and without limits, more urgent ones, and more rows than fit."""
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


def test_blocks_of_a_prompt_without_an_answer_are_read_as_published() -> None:
    """The wrong variant plans a row again after its blocks are published."""
    scheduler, whims = build(), Whims()
    scheduler.controller = whims
    whims.tell(2, 3)
    speculation = Speculation(num_drafts=2, draft_length=3, adaptive=True)
    scheduler.submit(msgspec.structs.replace(request("none", 3 * BLOCK_SIZE, 0), speculation=speculation))
    [row] = scheduler.plan().rows
    assert not row.fanout
    assert len(row.draft_input_ids) == len(row.input_ids) == 3 * BLOCK_SIZE
