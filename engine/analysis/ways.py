"""The fast ways of an engine: which it uses, and how to run it without them. For sessions on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import msgspec
import torch

from engine.engine import Engine
from engine.execution.lean import LeanDecoder
from engine.execution.runner import ModelRunner
from engine.plan import Plan
from engine.recorded.steps import RecordedStep
from engine.sampling import fused
from engine.speculation.verification import fused_block


def ways(engine: Engine) -> dict[str, bool]:
    """By name, whether each fast way is used."""
    assert engine.draft_runner is not None
    some = torch.empty((1, 1), device=engine.target.device)
    compiler = fused.compiler_for(some)
    found = {
        "whole steps": engine.recorded.num_recorded > 0,
        "kernels for rows": compiler is not None,
        "kernels for verification": compiler is not None and fused_block.work_on(some.device, compiler),
    }
    for name, runner in (("target", engine.target), ("draft", engine.draft_runner)):
        found |= {f"{name}: {way}": used for way, used in runner.fast_ways.items()}
        found[f"{name}: kernels for layers"] = isinstance(runner.backend, LeanDecoder) and runner.backend.use_kernels
    return found


@contextmanager
def without(engine: Engine, variant: str) -> Iterator[None]:
    """The engine without one of its fast ways."""
    assert engine.draft_runner is not None
    runners: list[ModelRunner] = [engine.target, engine.draft_runner]
    with ExitStack() as stack:
        if variant == "whole steps":
            stack.enter_context(patch.object(engine.recorded, "serves", False))
        elif variant == "kernels for verification":
            stack.enter_context(patch.object(fused_block, "compiler_for", lambda *_: None))
        elif variant == "kernels for rows":
            stack.enter_context(patch.object(fused, "compiler_for", lambda _: None))
        elif variant == "equal nodes apart":
            stack.enter_context(patch.object(engine, "most_unmerged", 0))
        for runner in runners:
            if variant == "kernels for layers" and isinstance(runner.backend, LeanDecoder):
                stack.enter_context(patch.object(runner.backend, "use_kernels", False))
        yield


@contextmanager
def steps_of(engine: Engine, kind: str) -> Iterator[list[bool]]:
    """All steps of a kind; gives whether each was recorded. Recorded ones have two requests, to have room for 4x5."""
    is_recorded = kind == "recorded"
    limits, find = engine.scheduler.config, engine.recorded.find
    served: list[bool] = []

    def noting(plan: Plan) -> RecordedStep | None:
        found = find(plan)
        served.append(found is not None)
        return found

    with (
        patch.object(engine.recorded, "serves", is_recorded),
        patch.object(engine.recorded, "find", noting),
        patch.object(engine, "most_unmerged", 0 if kind == "equal nodes merged" else 10**6),
        patch.object(
            engine.scheduler,
            "config",
            msgspec.structs.replace(limits, max_num_seqs=2 if is_recorded else limits.max_num_seqs),
        ),
    ):
        yield served
