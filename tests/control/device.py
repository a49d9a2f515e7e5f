"""A synthetic GPU: a pass takes as long as reading its weights or computing its tokens, and some
steps are recorded.

Steps advance a simulated clock. Calibration, scheduler, controller and telemetry are the engine's
own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from engine.config import SchedulerConfig
from engine.control.controller import Controller, menu
from engine.control.step_time import Point, StepTimes
from engine.control.step_work import PLAIN, StepWork
from engine.cuda.recorded.menu import menu as menu_of_steps
from engine.cuda.recorded.steps import RecordedSteps
from engine.plan import Emission, Plan, StepVerdict
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.outcome import Timing
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.store import BlockStore
from engine.start.calibration import measure_points
from engine.step.telemetry import Telemetry

LIMITS = Speculation(rule="bv_race", num_drafts=4, draft_length=5, adaptive=True)
LONGEST, BLOCK_SIZE = 16, 16
FLOPS, BYTES_PER_S = 550e12, 2.9e12
HOST_S, DRAFTING_HOST_S = 0.0004, 0.0005
"""Planning and messages."""
NOISE = 0.01
"""Standard deviation of the logarithm of a step's duration."""


def _pass_s(num_weights: float, tokens: float, attended_bytes: float, launches_s: float) -> float:
    """Return the seconds of a pass whose launches take the host this long; the device works
    meanwhile.
    """
    device_s = max(2 * num_weights / BYTES_PER_S, 2 * num_weights * tokens / FLOPS) + attended_bytes / BYTES_PER_S
    return max(device_s, launches_s) + 0.0003


def parts_s(work: StepWork, is_eager: bool, num_weights: float = 8.2e9) -> tuple[float, float]:
    """Return (seconds of drafting, of the rest); the draft model has 0.6 billion weights."""
    text_bytes = 147456 * (work.text + (work.nodes * work.text / max(1, work.rows) + work.prompt_text) / 20)
    rest_s = _pass_s(num_weights, work.rows + work.nodes + work.prompt, text_bytes, 0.007 * is_eager)
    rest_s += 3e-6 * (work.rows + work.nodes) + 0.001 * is_eager  # distributions and verdicts
    passes = work.passes or (0,) * bool(work.read)
    counts = [rows + work.read * (not depth) for depth, rows in enumerate(passes)]
    drafted_bytes = 114688 * work.text / max(1, work.rows) * work.num_drafting
    return sum(_pass_s(0.6e9, count, drafted_bytes, 0.0042 * is_eager) for count in counts), rest_s


class Device:
    """An engine on such a device, without tokens and probabilities."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_recorded: bool = True, num_weights: float = 8.2e9) -> None:
        """num_weights: of the target."""
        self.now, self.num_weights, self.random = 0.0, num_weights, np.random.default_rng(5)
        monkeypatch.setattr("engine.step.telemetry.time", SimpleNamespace(perf_counter=lambda: self.now))
        self.facts = SimpleNamespace(max_model_len=40960, block_size=BLOCK_SIZE, num_blocks=12300)
        self.target = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        self.recorded: Any = RecordedSteps()
        self.recorded._most_pages = self.facts.max_model_len
        if is_recorded:
            drafts = [PLAIN, *menu(LIMITS.num_drafts, LIMITS.draft_length, LONGEST)]
            self.recorded.steps = {shape: object() for shape in menu_of_steps(drafts, SchedulerConfig().max_num_seqs)}
        self.serve_anew()

    def serve_anew(self, times: StepTimes | None = None) -> None:
        """Begin with an empty scheduler and, if the times are known, another controller."""
        blocks = BlockStore(self.facts.num_blocks, BLOCK_SIZE, keeps_content=False)
        self.scheduler = Scheduler(SchedulerConfig(), blocks, frozenset())
        self.scheduler.times = times
        if times is not None:
            self.scheduler.controller = Controller(times, LONGEST)
        self.telemetry = Telemetry(self.scheduler, SimpleNamespace(type="cpu"))  # type: ignore[arg-type]

    def measured(self) -> list[Point]:
        """Return the measurements of a start."""
        engine: Any = self
        return measure_points(engine, LIMITS)

    def true_s(self, work: StepWork) -> tuple[float, float]:
        """Return (seconds of drafting, of the rest) of a step that the engine has not planned."""
        is_eager = self.recorded.is_eager(work) if self.recorded.steps else True
        return parts_s(work, is_eager, self.num_weights)

    def carry_out(self, plan: Plan) -> None:
        """Advance the clock by the step's time; only a plan with a recorded shape is not launched
        one by one.
        """
        self.telemetry.is_eager = self.recorded.find(plan) is None
        draft_s, rest_s = parts_s(StepWork.of(plan), self.telemetry.is_eager, self.num_weights)
        with self.telemetry.phase("parts"):
            for phase, seconds in (("draft", draft_s), ("target", rest_s)):
                with self.telemetry.phase(phase):
                    self.now += seconds * float(self.random.lognormal(0.0, NOISE))


class Load:
    """Requests that follow one another at a number of clients: every answer is followed by another
    prompt.
    """

    def __init__(
        self,
        device: Device,
        clients: int,
        prompt: int,
        answer: int,
        speculation: Speculation,
        accepted: float = 0.7,
        sampling: Sampling | None = None,
        min_tokens: int = 0,
    ) -> None:
        """accepted: how often a drafted token of one chain is accepted, given those before it."""
        self.device, self.prompt, self.answer, self.speculation = device, prompt, answer, speculation
        self.sampling, self.min_tokens = sampling or Sampling(), min_tokens
        self.accepted, self.num_tokens, self.num_submitted = accepted, 0, 0
        self.timing = Timing()
        self.works: list[StepWork] = []
        for number in range(clients):
            self.submit(1 + answer * (number + 1) // clients)  # not all at the same time

    def submit(self, answer: int, **more: Any) -> None:
        """Queue a request. more: replaces fields of it."""
        self.num_submitted += 1
        prompt = tuple(range(self.num_submitted * 10**6, self.num_submitted * 10**6 + self.prompt))
        request = Request(
            request_id=str(self.num_submitted),
            prompt_token_ids=prompt,
            limits=Limits(max_tokens=answer, min_tokens=min(self.min_tokens, answer)),
            speculation=self.speculation,
            sampling=self.sampling,
        )
        self.device.scheduler.submit(replace(request, **more))

    def step(self) -> None:
        """One step."""
        device, scheduler = self.device, self.device.scheduler
        device.telemetry.stopwatch.start()
        plan = scheduler.plan()
        device.now += (DRAFTING_HOST_S if any(row.fanout for row in plan.rows) else HOST_S) / 2
        device.carry_out(plan)
        outcomes = scheduler.commit(plan, self.verdict(plan))
        device.now += HOST_S / 2
        stats = device.telemetry.learn(device.telemetry.end_step(0))
        self.works.append(StepWork.of(plan))
        for outcome in outcomes:
            self.num_tokens += len(outcome.token_ids)
            self.timing.add(stats, outcome)
            if outcome.finish_reason is not None:
                self.submit(self.answer)

    def verdict(self, plan: Plan) -> StepVerdict:
        """Accept each drafted token by chance, given those before it; more often with more
        chains.
        """
        return StepVerdict(tuple([self.emission(row.num_drafts, row.draft_length) for row in plan.sampling_rows]))

    def emission(self, num_drafts: int, length: int) -> Emission:
        """Return the tokens of a request that drafts these chains."""
        chance = 1 - (1 - self.accepted) ** (num_drafts**0.25)
        rejected = np.flatnonzero(self.device.random.random(length) >= chance)
        count = int(rejected[0]) if len(rejected) else length
        return Emission((7,) * count, 7, num_drafts * length, num_draft_kept=max(0, min(count, length - 1)))

    def rate(self, num_steps: int, warm: int = 200) -> float:
        """Return tokens per second of the steps after the first ones."""
        for number in range(warm + num_steps):
            if number == warm:
                began, before = self.device.now, self.num_tokens
                self.timing = Timing()
                self.works = []
            self.step()
        return (self.num_tokens - before) / (self.device.now - began)
