"""The prefix cache finds as much of a prompt with a head as without, and a head's tokens have the
stated size.

Requests with a few shared beginnings, four at once, to the embedded target with heads of random
weights: what the cache finds depends on no weights.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.models.runner import ModelRunner
from engine.request import Limits, Request, Sampling, Speculation
from engine.start.building import assemble
from engine.start.distribution_check import run_to_end
from engine.step.engine import Engine
from research.analysis.loading import random_prompts
from research.analysis.times.heads import load_target, random_head
from research.analysis.times.steps import most_drafts

DOCS = Path(__file__).parents[3] / "docs"
LENGTH = 3


class Prompts(NamedTuple):
    """Counts of the prompts and their tokens."""

    requests: int
    beginnings: int
    shared: int
    own: int


def load(kind: str) -> Engine:
    """Return an engine of the embedded target with a head of one layer, or without a draft
    model.
    """
    target = load_target("embedded")  # an engine takes the weights out of its target
    head = None if kind == "none" else random_head(kind, target, 1, LENGTH)
    config = EngineConfig(
        model=ModelConfig(target="target", draft=None if head is None else "head", device="cpu"),
        cache=CacheConfig(memory_bytes=1 << 28),
        scheduler=SchedulerConfig(max_num_seqs=4),
        speculation=most_drafts(1, LENGTH),
    )
    return assemble(config, target, head, is_owner=True)


def cell(kind: str, prompts: Prompts) -> dict[str, object]:
    """Answer the requests; return tokens asked for and found, and bytes of one token in target and
    head.
    """
    engine = load(kind)
    drafts = Speculation(rule="block", num_drafts=1, draft_length=LENGTH)
    beginnings = itertools.cycle(random_prompts(prompts.beginnings, prompts.shared, 0))
    ends = random_prompts(prompts.requests, prompts.own, 1)
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=(*next(beginnings), *end),
            sampling=Sampling(temperature=1.0, seed=number),
            limits=Limits(max_tokens=16, ignore_eos=True),
            speculation=Speculation() if kind == "none" else drafts,
        )
        for number, end in enumerate(ends)
    ]
    run_to_end(engine, requests)
    return {
        "head": kind,
        "cached_prompt_tokens": engine.scheduler.num_cache_hits,
        "queries": engine.scheduler.num_cache_queries,
        "target_bytes_per_token": token_bytes(engine.target),
        "head_bytes_per_token": 0 if engine.draft_runner is None else token_bytes(engine.draft_runner),
    }


def token_bytes(runner: ModelRunner) -> int:
    """Return the bytes of a token's K, V and hidden states."""
    storage = runner.storage
    stored = [storage.keys, storage.values]
    if storage.hidden is not None:
        stored.append(storage.hidden)
    return sum(tensor.nbytes for tensor in stored) // storage.keys.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "dflash"])
def test_requests_find_the_whole_blocks_of_beginnings_that_others_computed(kind: str) -> None:
    """Two beginnings of two blocks and a half, six requests: all but the first two find two
    blocks.
    """
    measured = cell(kind, Prompts(requests=6, beginnings=2, shared=40, own=5))
    assert (measured["cached_prompt_tokens"], measured["queries"]) == (4 * 32, 6 * 45)
    assert (measured["head_bytes_per_token"] == 0) == (kind == "none")


COMMITTED = json.loads((DOCS / "results" / "heads-prefix-cpu.json").read_text())["cells"]


@pytest.mark.slow
@pytest.mark.parametrize("committed", COMMITTED, ids=lambda committed: committed["head"])
def test_committed_counts_are_found_again(committed: dict[str, object]) -> None:
    assert cell(str(committed["head"]), Prompts(requests=16, beginnings=4, shared=200, own=33)) == committed
