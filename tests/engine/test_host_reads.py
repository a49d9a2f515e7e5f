"""A step reads from the device twice: what was drafted, and the verdict. Drafting itself waits for nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch

from engine.drafters.chains import draw_chains
from engine.engine import Engine
from engine.request import Speculation
from tests.engine import tiny

READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
# Drafted tokens, the verdict, and behind it, when the device has nothing left to do, whether all numbers were finite.
SHAPES = {
    "off": (tiny.OFF, 2),
    "block": (Speculation(rule="block", num_drafts=1, draft_length=4), 3),
    "bv_race": (Speculation(rule="bv_race", num_drafts=3, draft_length=4), 3),
}


@contextlib.contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Counts the calls that would wait for a device."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> object:
        right = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: object, **kwargs: object) -> object:
            counts[name] += 1
            return right(self, *args, **kwargs)

        return read

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(torch.Tensor, name, counting(name)))
        yield counts


def running(speculation: Speculation, num_logprobs: int | None = None, **sampling: Any) -> Engine:
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.05))
    for i in range(3):
        one = tiny.request(str(i), range(5 + i, 20 + i), speculation, 40, **{"temperature": 1.0, "seed": i, **sampling})
        engine.submit(msgspec.structs.replace(one, num_logprobs=num_logprobs))
    for _ in range(3):
        engine.run_step()
    return engine


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_reads_what_was_drafted_and_the_verdict(name: str) -> None:
    speculation, most = SHAPES[name]
    engine = running(speculation)
    engine.limits = type(engine.limits)(observed_share=0.0)
    for _ in range(3):
        with counted_reads() as counts:
            engine.run_step()
        assert counts.total() == most, counts


@pytest.mark.parametrize(
    ("wish", "reads"),
    [
        ({"top_k": 5}, 3),
        ({"temperature": 0.0}, 3),
        ({"min_p": 0.1}, 3),
        # One copy for the logprobs of all rows.
        ({"num_logprobs": 3}, 4),
        # The paths of four levels, which penalties are counted along, come to the host.
        ({"frequency_penalty": 0.5}, 3 + 4),
    ],
)
def test_what_requests_ask_for_costs_few_reads(wish: dict[str, Any], reads: int) -> None:
    engine = running(SHAPES["bv_race"][0], **wish)
    engine.limits = type(engine.limits)(observed_share=0.0)
    with counted_reads() as counts:
        engine.run_step()
    assert counts.total() == reads, counts


@pytest.mark.parametrize("name", ["block", "bv_race"])
def test_drafting_reads_its_tokens_once_at_its_end(name: str) -> None:
    engine = running(SHAPES[name][0])
    with counted_reads() as counts:
        draw_chains(engine.scheduler.plan(), engine.drafter, engine.target.vocab_size, engine.target.device)
    assert counts == {"tolist": 1}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_drafting_does_not_wait_for_the_device() -> None:
    """CUDA itself finds waits that no count of calls shows."""
    engine = running(SHAPES["bv_race"][0])
    plan = engine.scheduler.plan()
    draw_chains(plan, engine.drafter, engine.target.vocab_size, engine.target.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with patch("engine.drafters.chains.merge", lambda *_: ()):
            draw_chains(plan, engine.drafter, engine.target.vocab_size, engine.target.device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
