"""Files of the engine that a default step enters.

A separate process measures them, `python -m tests.entered_files compiled`: after some thousand
tests Python 3.11 may never leave a function that is entered while calls are noted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from engine.step.engine import Engine

ROOT = Path(__file__).resolve().parents[1]


class StepFiles(NamedTuple):
    """Files of the engine that a step enters, in the order of the first calls."""

    step: list[str]
    """Files of the whole step."""
    launched: list[str]
    """Files of drafting, the target's pass and verification."""


class Entered:
    """Context in which the files of all functions that are called are noted."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._before: Any = None

    def __enter__(self) -> Entered:
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(self._before)

    def _note(self, frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            self._names[frame.f_code.co_filename] = None

    @property
    def files(self) -> list[str]:
        """Return the files of the engine, below the root of the project, in order."""
        prefix = f"{ROOT}/"
        names = [name.removeprefix(prefix) for name in self._names if name.startswith(prefix)]
        return [name for name in names if name.startswith("engine/")]

    def during(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Call a function, and note the files during the call."""
        with self:
            return function(*operands)


def adaptive_engine(compiled: bool) -> Engine:
    """Return an engine that decodes two requests with the default speculation, whose shape it
    chooses.

    compiled: whether it computes with the compiled calls of a CPU, or with torch's operations.
    """
    # Modules move: all names of the engine that the measurement needs stand here.
    from engine.config import SpeculationConfig
    from engine.control.controller import Controller
    from engine.control.step_time import StepTimes
    from engine.kernels.torch_kernels import TORCH
    from engine.scheduling.request_checks import default_speculation
    from engine.start import building
    from tests.engine import tiny
    from tests.scheduling.machine import Machine
    from tests.wrong import instead

    target = tiny.llama(seed=1)
    draft = tiny.perturbed(target, seed=2, amount=0.02)
    with ExitStack() as stack:
        if not compiled:
            stack.enter_context(tiny.without_cpu_decoder())
            stack.enter_context(instead(building, "choose", lambda *_: TORCH))
        engine = tiny.build(target, draft, num_drafts=2, draft_length=3)
    defaults = SpeculationConfig(adaptive=True)
    engine.scheduler.times = StepTimes(Machine().prices())
    engine.scheduler.controller = Controller(engine.scheduler.times, defaults.max_draft_length)
    speculation = default_speculation(defaults, engine.facts)
    for name, prompt in zip("ab", tiny.prompts(101, [9, 12]), strict=True):
        engine.submit(tiny.request(name, prompt, speculation, max_tokens=60, temperature=0.8))
    return engine


def step_files(compiled: bool = False) -> StepFiles:
    """Return the files that a default step enters."""
    from tests.wrong import instead

    engine = adaptive_engine(compiled)
    for _ in range(4):  # prompts, and what is compiled or cached at its first use
        engine.run_step()
    # The controller explores: the files depend on its choice, so the first step that drafts counts.
    for _ in range(8):
        step, launched = Entered(), Entered()
        with ExitStack() as stack:
            if not compiled:
                for name in ("draw", "forward", "verify"):
                    stack.enter_context(instead(engine.unrecorded, name, launched.during))
            result = step.during(engine.run_step)
        if any(outcome.num_nodes for outcome in result.outcomes):
            return StepFiles(list(dict.fromkeys([*step.files, *launched.files])), launched.files)
    raise AssertionError("no step has drafted")


if __name__ == "__main__":
    print(json.dumps(step_files(compiled="compiled" in sys.argv)))
