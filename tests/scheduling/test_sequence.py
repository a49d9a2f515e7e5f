"""The running state of a request: lengths, end, and keys of its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.fixed_edits import SharedEdits
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.draft_prefill import DraftPrefill
from engine.scheduling.rows import plan_row
from engine.scheduling.sequence import Sequence, expendability, urgency
from engine.scheduling.store import BlockStore, next_key, root_key

PROMPT, END, STOP = (3, 4, 5), 1, 9


def sequence(number: int = 7, limits: dict[str, Any] | None = None, request: Any = None, **more: Any) -> Sequence:
    """A sequence of three prompt tokens that may get four more."""
    ends = Limits(**{"max_tokens": 4, "stop_token_ids": (STOP,), **(limits or {})})
    asked = Request(request_id="r", prompt_token_ids=PROMPT, limits=ends, **(request or {}))
    return Sequence(number, asked, 10.0, **more)


def test_a_new_request_has_its_prompt_and_nothing_computed() -> None:
    speculation = Speculation(num_drafts=2, draft_length=2)
    new = sequence(request={"sampling": Sampling(presence_penalty=1.0), "speculation": speculation})
    assert (new.sequence_id, new.tokens, new.num_prompt) == (7, [3, 4, 5], 3)
    assert [list(each) for each in new.counts.of([3, 4, 5, 4])] == [[3, 4, 5], [0, 1, 0]]
    assert (new.num_target_computed, new.num_draft_computed, new.draft_kv_first, new.num_cached) == (0, 0, 0, 0)
    assert (new.block_ids, new.num_published_blocks, new.num_blocks_with_draft_kv) == ((), 0, 0)
    assert (new.num_emitted, new.num_remaining, new.num_missing, new.num_shared) == (0, 4, 3, 2)
    assert (new.queue_s, new.take_reading(), new.prompt_logprobs, new.shifts) == (0, (0, 0), [], ())
    assert (new.grammar, new.by_head, new.may_draft) == (None, False, True)
    assert new.request.sampling.edits_logits
    assert not sequence().request.sampling.edits_logits
    assert sequence(grammar=...).grammar is ...
    assert not new.text_draft_finder
    finding = sequence(request={"speculation": Speculation(drafters=("prompt_lookup",))})
    assert finding.text_draft_finder
    assert new.last_step < 0, "it comes before those that had a step"


@pytest.mark.parametrize(
    ("limits", "masked", "cut"),
    [
        ({}, (), [END]),
        ({"ignore_eos": True}, (), [END, 2]),
        ({"min_tokens": 1}, (END, STOP), [END]),
        ({"min_tokens": 1, "ignore_eos": True}, (STOP,), [END, 2]),
    ],
)
def test_end_tokens_end_the_answer_and_are_masked_before_its_least_length(
    limits: dict[str, Any], masked: tuple[int, ...], cut: list[int]
) -> None:
    edits = SharedEdits()
    first, second = (sequence(limits=limits, eos_token_ids=frozenset({END}), edits=edits) for _ in range(2))
    assert first.fixed_edits is edits.of(first.request.sampling, masked)
    assert first.cut([END, 2]) == (cut, "stop" if len(cut) == 1 else None)
    assert second.cut([2, STOP, 2]) == ([2, STOP], "stop")
    assert second.cut([2, 2, 2]) == ([2, 2, 2], None)
    assert second.cut([2, 2, 2, 2]) == ([2, 2, 2, 2], "length")
    assert second.cut([2, 2, 2, 2, STOP]) == ([2, 2, 2, 2], "length")
    assert second.cut([2, 2, 2, STOP]) == ([2, 2, 2, STOP], "stop")


def test_an_answer_of_no_tokens_is_only_its_prompt() -> None:
    assert sequence(limits={"max_tokens": 0}).cut([STOP]) == ([], "length")


@pytest.mark.parametrize("by_head", [False, True])
def test_a_head_drafts_after_a_single_token_of_an_answer(by_head: bool) -> None:
    running = sequence(by_head=by_head)
    drafting, shared = [], []
    for tokens, num_computed in (((), 0), ((), 2), ((8,), 3), ((8, 8), 3), ((8, 8), 4)):
        running.tokens, running.num_target_computed = [*PROMPT, *tokens], num_computed
        drafting.append(running.may_draft)
        shared.append(running.num_shared)
    assert drafting == ([False, False, True, False, True] if by_head else [True] * 5)
    assert shared == ([2, 2, 2, 3, 3] if by_head else [2, 2, 3, 4, 4])


@pytest.mark.parametrize(
    ("num_drafts", "window", "num_draft", "next_read", "lag"),
    [(1, 0, 0, 0, 9), (1, 0, 7, 7, 2), (1, 0, 9, 9, 0), (0, 0, 0, 0, 0), (1, 4, 0, 6, 3), (1, 4, 8, 8, 1)],
)
def test_a_row_that_drafts_reads_all_that_the_draft_model_lacks(
    num_drafts: int, window: int, num_draft: int, next_read: int, lag: int
) -> None:
    """A token that the draft model never sees changes no answer, only the acceptance."""
    speculation = Speculation(num_drafts=num_drafts, draft_length=num_drafts)
    running = sequence(request={"speculation": speculation}, limits={"max_tokens": 20}, draft_window=window)
    running.tokens += [8] * 7
    running.num_target_computed, running.num_draft_computed = 9, num_draft
    assert (running.next_draft_read, running.draft_lag) == (next_read, lag)
    if not num_drafts:
        return
    row = plan_row(running, (1,), 1 + max(1, lag), 0, None)
    assert (row.draft_read_first, row.draft_read_end, row.emits) == (next_read, 10, True)
    assert not plan_row(running, (1,), max(1, lag), 0, None).emits, "the lag and the last token do not fit"
    prefill = DraftPrefill(SchedulerConfig(max_num_batched_tokens=8 * max(1, lag)), 0)
    assert not prefill.is_far(running)
    assert DraftPrefill(SchedulerConfig(max_num_batched_tokens=8), 0).is_far(running) == (lag > 1)


@pytest.mark.parametrize(
    ("draft_window", "is_fixed", "expected"), [(0, False, (0, True)), (64, False, (64, True)), (64, True, (0, False))]
)
def test_blocks_are_shared_by_requests_with_the_server_s_window(
    draft_window: int, is_fixed: bool, expected: tuple[int, bool]
) -> None:
    running = sequence(draft_window=draft_window, fixed_draft_distribution=is_fixed)
    assert (running.draft_window, running.shares_blocks) == expected
    assert (sequence().draft_window, sequence().shares_blocks) == (0, True)
    assert sequence(draft_window=64).draft_window == 64


def test_prompt_logprobs_are_wanted_until_the_first_token() -> None:
    running = sequence(request={"num_prompt_logprobs": 0})
    assert running.wants_prompt_logprobs
    assert not sequence().wants_prompt_logprobs
    running.tokens.append(2)
    assert not running.wants_prompt_logprobs


def test_prompt_reading_time_is_counted_once() -> None:
    running = sequence()
    running.note_reading(2.0, 1.0)
    running.note_reading(0.5, 0.25)
    assert running.take_reading() == (2.5, 1.25)
    assert running.take_reading() == (0, 0)


def test_keys_of_blocks_are_of_all_tokens_before() -> None:
    running = sequence(request={"cache_salt": "s"})
    running.tokens = list(range(10, 17))
    keys = [root_key("s")]
    for start in (0, 2, 4):
        keys.append(next_key(keys[-1], list(range(10 + start, 12 + start))))
    for count in (1, 3, 2, 0):
        assert running.block_keys(count, 2) == keys[1 : count + 1]


def test_only_the_first_admission_counts() -> None:
    running = sequence()
    running.num_target_computed = 2
    running.note_admission(14.0)
    running.num_target_computed = 3
    running.note_admission(20.0)
    assert (running.queue_s, running.num_cached) == (4, 2)


def test_a_preempted_request_gives_back_all_it_has_computed() -> None:
    running = sequence()
    tables = BlockTables(BlockStore(4, 1), BlockStore(2, 1))
    running.block_ids, running.draft_block_ids, running.first_draft_block = tuple(tables.target.allocate(2)), (0, 1), 1
    assert tables.draft is not None
    tables.draft.release(tables.draft.allocate(2)[:1])
    running.num_target_computed, running.num_draft_computed, running.draft_kv_first = 3, 2, 1
    running.num_published_blocks, running.num_blocks_with_draft_kv = 2, 1
    running.prompt_logprobs = [...]  # type: ignore[list-item]
    tables.release(running)
    running.forget_computed()
    assert (tables.target.num_used, tables.draft.num_used) == (0, 0)
    assert (running.block_ids, running.draft_block_ids, running.first_draft_block) == ((), (), 0)
    assert (running.num_target_computed, running.num_draft_computed, running.draft_kv_first) == (0, 0, 0)
    assert (running.num_published_blocks, running.num_blocks_with_draft_kv, running.prompt_logprobs) == (0, 0, [])


def test_the_least_urgent_that_loses_least_is_preempted_first() -> None:
    urgent, computed, early, late = (sequence(number, request={"priority": int(number > 0)}) for number in range(4))
    computed.num_target_computed = 2
    assert sorted((late, early, computed, urgent), key=urgency) == [urgent, computed, early, late]
    assert sorted((late, early, computed, urgent), key=expendability) == [urgent, computed, early, late]


class _FindsNothing:
    """A finder of text drafts that is used, and finds none: its row is planned in all steps."""

    def find(self, _text: Any, _most_nodes: int, _deepest: int) -> tuple[()]:
        return ()


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("num_draft", [0, 2, 4])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("budget", [-2, 0, 1, 9])
def test_a_plain_row_is_planned_as_all_rows_are(by_head: bool, num_draft: int, window: int, budget: int) -> None:
    """The short cut for decoding without drafts gives what the rest of the function would."""
    rows = []
    for finder in (None, _FindsNothing()):
        running = sequence(by_head=by_head, draft_window=window)
        running.tokens += [8, 8]
        running.num_target_computed, running.num_draft_computed = 4, num_draft
        running.text_draft_finder = finder or running.text_draft_finder  # type: ignore[assignment]
        rows.append(plan_row(running, (), budget, 4, None)._replace(sequence=None))  # type: ignore[arg-type]
    assert rows[0] == rows[1]
    assert rows[0].emits == (budget > 0)
