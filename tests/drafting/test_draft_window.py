"""Blocks of the draft model with a draft window: read, shared and released."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.plan import Plan
from engine.request import Request, Speculation
from engine.scheduling.rows import PlannedRow
from engine.scheduling.scheduler import Scheduler
from engine.step.engine import Engine
from tests.cuda.test_recorded_steps import RECORDED
from tests.engine import tiny
from tests.grid import grid
from tests.wrong import instead

pytestmark = pytest.mark.usefixtures("attention_in_torch")
BLOCK_SIZE, WINDOW = 8, 12
PATHS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "compiled": contextlib.nullcontext,
    "torch": tiny.without_cpu_decoder,
    "recorded": lambda: tiny.with_recorded_steps(RECORDED),
}
KINDS = (
    Speculation(rule="bv_race", num_drafts=2, draft_length=3),
    Speculation(rule="block", num_drafts=1, draft_length=5),
    tiny.OFF,
    Speculation(rule="traversal", num_drafts=4, draft_length=2, tree=(2, 2)),
    Speculation(rule="greedy_block", num_drafts=1, draft_length=4),
)


def asked(count: int, max_tokens: int = 14) -> list[Request]:
    """Requests of all kinds, with texts of one to five windows and equal beginnings."""
    shared, *texts = tiny.prompts(61, [16, *(9 * number for number in range(1, count + 1))])
    return [
        tiny.request(str(i), [*shared[: 16 * (i % 2)], *text], KINDS[i % len(KINDS)], max_tokens, seed=i, temperature=1)
        for i, text in enumerate(texts)
    ]


def build(path: str, draft_window: int = WINDOW, **more: Any) -> Engine:
    target = tiny.llama(1, layers=2)
    with PATHS[path]():
        return tiny.build(
            target, tiny.perturbed(target, 2, 0.05), block_size=BLOCK_SIZE, draft_window=draft_window, **more
        )


def results(engine: Engine, requests: list[Request]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return tokens of the answers, and the accepted tokens of each step."""
    run = tiny.run(engine, requests)
    return run.tokens, {name: [one.num_accepted for one in of_one] for name, of_one in run.outcomes.items()}


@contextlib.contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """Set the draft model's storage that no sequence holds to NaN before each step."""
    runner, draft = engine.draft_runner, engine.scheduler.tables.draft
    assert runner is not None
    assert draft is not None
    draft.keeps_content = False  # what is released may still be of use to other requests

    def planned(plan: Callable[[Scheduler], Plan], scheduler: Scheduler) -> Plan:
        found = plan(scheduler)
        free = sorted(set(range(draft.num_blocks)) - draft._num_holders.keys())
        slots = (torch.tensor(free)[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        with torch.inference_mode():
            for kept in (runner.storage.keys, runner.storage.values):
                kept[:, slots.to(kept.device)] = torch.nan
        return found

    with instead(Scheduler, "plan", planned):
        yield


@pytest.mark.sole("draft windows")
@pytest.mark.sampled
@pytest.mark.parametrize("path", grid(PATHS, {"compiled", "torch"}))
def test_no_released_block_is_read(path: str) -> None:
    """The wrong variant releases the first block of the window."""
    requests = asked(10)
    expected = results(build(path), requests)
    engine = build(path)
    with poisoned(engine):
        assert results(engine, requests) == expected
    assert sum(map(sum, expected[1].values())) > len(requests), "drafts are accepted"
    engine = build(path)
    with poisoned(engine), instead(PlannedRow, "first_draft_key", lambda right, part: right(part) + BLOCK_SIZE):
        assert tiny.run(engine, requests, can_fail=True).tokens != expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["compiled", "torch"])
def test_a_pool_for_windows_changes_nothing_if_the_window_holds_all(path: str) -> None:
    """Same tokens and drafts as with one pool, with preemptions and a prefix cache."""
    found = []
    for window in (0, 200):
        engine = build(path, window, num_blocks=30, budget=400, max_num_seqs=6)
        found.append([results(engine, asked(10)), results(engine, asked(10, max_tokens=20))])
        assert engine.scheduler.num_preemptions > 0
        assert engine.scheduler.num_cache_hits > 100
    assert found[0] == found[1]


def test_a_draft_model_with_few_blocks_serves_all() -> None:
    """Its pool holds one longest text."""
    engine = build("compiled", num_blocks=100, max_model_len=104, max_num_seqs=4)
    draft = engine.scheduler.tables.draft
    assert draft is not None
    assert draft.num_blocks < engine.facts.num_blocks
    assert engine.facts.memory_plan["draft_kv_cache"] < engine.facts.memory_plan["kv_cache"]
    requests = asked(9)
    assert {len(tokens) for tokens in results(engine, requests)[0].values()} == {14}
    assert draft.num_used == 0
