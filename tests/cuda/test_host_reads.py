"""Drafting and the target's pass wait for nothing on a CUDA device.

`test_dry_run.py` counts the reads of all steps without one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.drafting.chains import draw_chains
from engine.kernels.torch_kernels import TORCH
from engine.request import Speculation
from engine.start import building
from engine.step.eager import target_inputs
from tests.engine import tiny
from tests.wrong import instead


@pytest.fixture
def _in_torch() -> Iterator[None]:
    with tiny.without_cpu_decoder(), instead(building, "choose", lambda *_: TORCH):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("_in_torch")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_drafting_does_not_wait_for_the_device() -> None:
    """CUDA itself finds waits that no count of calls shows."""
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.05))
    engine.recorded.serves = False
    chains = Speculation(rule="bv_race", num_drafts=3, draft_length=4)
    for i in range(3):
        engine.submit(tiny.request(str(i), range(5 + i, 20 + i), chains, 40, temperature=1.0, seed=i))
    for _ in range(3):
        engine.run_step()
    plan = engine.scheduler.plan()
    draw_chains(plan, engine.drafter, engine.target.vocab_size, engine.target.device, TORCH, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        draft = draw_chains(plan, engine.drafter, engine.target.vocab_size, engine.target.device, TORCH, 64)
        assert draft is not None
        engine.target.forward(target_inputs(plan, draft), draft.tokens_M)
    finally:
        torch.cuda.set_sync_debug_mode("default")
