"""The scheduler under any traffic: accounting holds, no request starves, every answer is complete."""

from __future__ import annotations

from collections.abc import Sequence as Many

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.control.step_time import StepTimes
from engine.plan import Plan, Row
from engine.request import Speculation
from tests.scheduling.machine import Machine
from tests.scheduling.test_scheduler import BLOCK_SIZE, Whims, build, request, verdict


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


class AdaptiveTraffic(Traffic):
    """The same where what requests draft changes at any time, and with it what the draft model has to catch up on."""

    def __init__(self) -> None:
        super().__init__()
        self.whims = Whims()
        self.scheduler.controller = self.whims

    @rule(num_drafts=st.integers(0, 3), draft_length=st.integers(1, 4), beside=st.booleans())
    def choose(self, num_drafts: int, draft_length: int, beside: bool) -> None:
        self.whims.tell(num_drafts, draft_length, beside)

    def speculation(self, drafts: int, draft_length: int) -> Speculation:
        return Speculation(num_drafts=drafts, draft_length=draft_length, adaptive=drafts > 0)


TestAdaptiveTraffic = AdaptiveTraffic.TestCase


TestAdaptiveTraffic.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_what_is_published_of_an_answer_of_one_token_is_computed() -> None:
    """Nothing is drafted for it, even if a shape is chosen; a request with the same beginning drafts after its
    prompt.
    """
    traffic = AdaptiveTraffic()
    traffic.choose(1, 1, beside=True)
    for length in (4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1):
        traffic.submit(length, max_tokens=1 + length % BLOCK_SIZE, drafts=1, draft_length=1, priority=0)
    traffic.step(0, 7)
    traffic.teardown()
