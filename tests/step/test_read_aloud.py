"""docs/execution.md reads a step of a CPU aloud: the files that a step enters, in the order in which it enters them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.config import SpeculationConfig
from engine.control.controller import Controller
from engine.control.step_time import StepTimes
from engine.scheduling.request_checks import default_speculation
from engine.step.engine import Engine, StepResult
from tests.engine import tiny
from tests.scheduling.machine import Machine

ROOT = Path(engine.__file__).parent
PAGE = ROOT.parent / "docs" / "execution.md"

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a step of a CPU")


def files_read_aloud() -> list[str]:
    """Return the files of the page's section, in order."""
    section = PAGE.read_text().split("<!-- read aloud -->")[1].split("<!-- read aloud: end -->")[0]
    return re.findall(r"`([\w/]+\.py)`", section)


def adaptive_engine() -> Engine:
    """Return an engine that decodes two adaptive requests."""
    target = tiny.llama(seed=1)
    machine = tiny.build(target, tiny.perturbed(target, seed=2, amount=0.02), num_drafts=2, draft_length=3)
    defaults = SpeculationConfig(adaptive=True)
    machine.scheduler.times = StepTimes(Machine().points())
    machine.scheduler.controller = Controller(machine.scheduler.times, defaults.max_draft_length)
    speculation = default_speculation(defaults, machine.facts)
    for name, prompt in zip("ab", tiny.prompts(101, [9, 12]), strict=True):
        machine.submit(tiny.request(name, prompt, speculation, max_tokens=60, temperature=0.8))
    return machine


def entered(machine: Engine) -> tuple[list[str], StepResult]:
    """Run a step; return the files of the engine that it enters, in order, and its result."""
    files: dict[str, None] = {}

    def note(frame: Any, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files[str(path.relative_to(ROOT))] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = machine.run_step()
    finally:
        sys.setprofile(before)
    return list(files), result


def test_a_step_is_read_aloud_in_order() -> None:
    machine = adaptive_engine()
    for _ in range(4):  # prompts, and what is compiled or cached at its first use
        machine.run_step()
    for _ in range(8):  # the first step that drafts: the controller also tries plain decoding
        files, result = entered(machine)
        if any(outcome.num_nodes for outcome in result.outcomes):
            break
    named = files_read_aloud()
    assert len(named) > 20
    assert [name for name in named if name not in files] == [], "files that the step does not enter"
    assert named == sorted(named, key=files.index)
