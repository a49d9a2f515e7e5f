"""A step that merges equal nodes reads from the device twice. Drafting itself waits for nothing.

`test_dry_run.py` counts the reads of all other steps.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from engine.drafting.chains import draw_chains
from engine.kernels import transfer
from engine.kernels.torch_kernels import TORCH
from engine.request import Speculation
from engine.start import building
from engine.step.eager import target_inputs
from engine.step.engine import Engine
from tests.engine import tiny
from tests.wrong import instead

READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
SHAPES = {
    "off": tiny.OFF,
    "block": Speculation(rule="block", num_drafts=1, draft_length=4),
    "bv_race": Speculation(rule="bv_race", num_drafts=3, draft_length=4),
    "spectr_gbv": Speculation(rule="spectr_gbv", num_drafts=3, draft_length=4),
    "lossy": Speculation(rule="token", num_drafts=1, draft_length=4, over_acceptance=0.2),
}


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    """Without what a CPU does faster: it looks at memory that no device has."""
    with (
        tiny.without_cpu_decoder(),
        instead(building, "choose", lambda *_: TORCH),
        instead(transfer, "are_here", lambda *_: False),
    ):
        yield


@contextlib.contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Counts the calls that would wait for a device."""
    counts: Counter[str] = Counter()

    def read(right: Any, *operands: Any, **named: Any) -> Any:
        counts[right.__name__] += 1
        return right(*operands, **named)

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(instead(torch.Tensor, name, read))
        yield counts


def running(speculation: Speculation) -> Engine:
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.05), max_over_acceptance=0.3)
    engine.unrecorded.most_unmerged = 0
    engine.recorded.serves = False  # on a device it has some
    engine.limits = msgspec.structs.replace(engine.limits, observed_share=0.0)
    for i in range(3):
        engine.submit(tiny.request(str(i), range(5 + i, 20 + i), speculation, 40, temperature=1.0, seed=i))
    for _ in range(3):
        engine.run_step()
    return engine


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_that_merges_reads_once_more(name: str) -> None:
    """Tokens, verdicts and whether all numbers were finite come together; merging needs the tokens
    before.
    """
    engine = running(SHAPES[name])
    for _ in range(3):
        with counted_reads() as counts:
            engine.run_step()
        assert counts.total() == (1 if name == "off" else 2), counts


@pytest.mark.parametrize("name", ["block", "bv_race"])
def test_drafting_reads_its_tokens_at_its_end_or_not_at_all(name: str) -> None:
    for most_unmerged, reads in ((0, {"tolist": 1}), (64, {})):
        engine = running(SHAPES[name])
        plan, target = engine.scheduler.plan(), engine.target
        with counted_reads() as counts:
            draw_chains(plan, engine.drafter, target.vocab_size, target.device, TORCH, most_unmerged)
        assert counts == reads


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_drafting_does_not_wait_for_the_device() -> None:
    """CUDA itself finds waits that no count of calls shows."""
    engine = running(SHAPES["bv_race"])
    plan = engine.scheduler.plan()
    draw_chains(plan, engine.drafter, engine.target.vocab_size, engine.target.device, TORCH, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        draft = draw_chains(plan, engine.drafter, engine.target.vocab_size, engine.target.device, TORCH, 64)
        assert draft is not None
        engine.target.forward(target_inputs(plan, draft), draft.tokens_M)
    finally:
        torch.cuda.set_sync_debug_mode("default")
