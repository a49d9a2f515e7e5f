"""Fast paths of an engine: which ones it uses, and how to run it without them. For sessions on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from engine.kernels.choosing import without as kernels_without
from engine.kernels.torch_kernels import TORCH
from engine.models.lean import LeanDecoder
from engine.models.runner import ModelRunner
from engine.plan import Plan
from engine.step.engine import Engine
from engine.step.recorded.steps import RecordedStep


def fast_paths(engine: Engine) -> dict[str, bool]:
    """Return by name whether each fast path is used."""
    assert engine.draft_runner is not None
    found = {
        "whole steps": engine.recorded.num_recorded > 0,
        "kernels for rows and verification": engine.target.kernels.by_tiles,
    }
    for name, runner in (("target", engine.target), ("draft", engine.draft_runner)):
        found |= {f"{name}: {path}": used for path, used in runner.fast_paths.items()}
        found[f"{name}: kernels for layers"] = isinstance(runner.backend, LeanDecoder) and runner.backend.use_kernels
    return found


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute temporarily."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without(engine: Engine, variant: str) -> Iterator[None]:
    """Run the engine without one of its fast paths."""
    assert engine.draft_runner is not None
    runners: list[ModelRunner] = [engine.target, engine.draft_runner]
    kernels = engine.target.kernels
    with ExitStack() as stack:
        if variant == "whole steps":
            stack.enter_context(_changed(engine.recorded, "serves", False))
        elif variant == "kernels for verification":
            stack.enter_context(_changed(engine.target, "kernels", kernels_without(kernels, ["race", "winners"])))
        elif variant == "kernels for rows":
            stack.enter_context(_changed(engine.target, "kernels", TORCH))
        elif variant == "equal nodes apart":
            stack.enter_context(_changed(engine.eager, "most_unmerged", 0))
        for runner in runners:
            if variant == "kernels for layers" and isinstance(runner.backend, LeanDecoder):
                stack.enter_context(_changed(runner.backend, "use_kernels", False))
        yield


@contextmanager
def steps_of(engine: Engine, kind: str) -> Iterator[list[bool]]:
    """Force steps of one type; yield whether each was recorded. Recorded ones have two requests, to have room for
    4x5.
    """
    is_recorded = kind == "recorded"
    limits, find = engine.scheduler.config, engine.recorded.find
    most_requests = 2 if is_recorded else limits.max_num_seqs
    served: list[bool] = []

    def noting(plan: Plan) -> RecordedStep | None:
        found = find(plan)
        served.append(found is not None)
        return found

    with (
        _changed(engine.recorded, "serves", is_recorded),
        _changed(engine.recorded, "find", noting),
        _changed(engine.eager, "most_unmerged", 0 if kind == "equal nodes merged" else 10**6),
        _changed(engine.scheduler, "config", msgspec.structs.replace(limits, max_num_seqs=most_requests)),
    ):
        yield served
