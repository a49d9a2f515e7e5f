"""Fast paths of an engine: which ones it uses, and steps with or without recordings.

For sessions on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.cuda.lean_decoder import LeanDecoder
from engine.plan import Plan
from engine.step.eager import Step
from engine.step.engine import Engine


def fast_paths(engine: Engine) -> dict[str, bool]:
    """Return by name whether each fast path is used."""
    assert engine.draft_runner is not None
    found = {
        "whole steps": engine.recorded.num_recorded > 0,
        "kernels for verification": engine.target.kernels.by_tiles,
        "kernels for filters": engine.target.kernels.reads_no_filter,
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
def steps_of(engine: Engine, is_recorded: bool = True) -> Iterator[list[bool]]:
    """Let steps be recorded ones or not; yield whether each was.

    They have two requests at most, which leaves room for 4x5.
    """
    limits, find = engine.scheduler.config, engine.recorded.find
    served: list[bool] = []

    def noting(plan: Plan) -> Step | None:
        found = find(plan)
        served.append(found is not None)
        return found

    with (
        _changed(engine.recorded, "serves", is_recorded),
        _changed(engine.recorded, "find", noting),
        _changed(engine.scheduler, "config", msgspec.structs.replace(limits, max_num_seqs=2)),
    ):
        yield served
