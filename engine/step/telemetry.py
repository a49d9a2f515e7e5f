"""Measurements of a running engine: times of each step, and the time that plain decoding would have taken.

The engine reports when a step begins and ends, and which part runs. Nothing here changes what a step does. The model of
step times learns from every step. Answers and dashboards get the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from engine.control.step_work import PLAIN, Shape, StepWork
from engine.needs import DISTRIBUTION_NEEDS
from engine.plan import Plan
from engine.scheduling.outcome import PHASES, StepStats
from engine.scheduling.scheduler import Scheduler

_PARTS = "parts"
_PACE_STEPS = 100.0
"""Number of steps after which about a third of a step's influence on the pace remains."""
_LEAST_ALIKE = 4
"""Steps of a shape before those whose caches are warm."""


class CudaClock:
    """Clock of a CUDA device: the host continues while the device still works. Marks are events of the stream."""

    def mark(self) -> torch.cuda.Event:
        """Return the moment at which the stream has finished all work given so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Return the time between two marks; None if the stream has not reached the second one."""
        return float(begin.elapsed_time(end)) / 1e3 if end.query() else None  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the stream has reached a mark."""
        mark.synchronize()


class Stopwatch:
    """Times a step and its phases. On a device, its clock is used: the host may finish a phase much earlier."""

    def __init__(self, clock: CudaClock | None = None) -> None:
        self._clock = clock
        self.start()
        self.stopped = self.started
        self.parts_s = 0.0
        """Time of the last step's parts; the rest was planning."""

    def start(self) -> None:
        """Begin a step."""
        self._phases_s = dict.fromkeys((*PHASES, _PARTS), 0.0)
        self._marks: list[tuple[str, float, Any, Any]] = []
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside for this phase."""
        began = time.perf_counter()
        on_device = self._clock if name != _PARTS else None
        begin = on_device.mark() if on_device is not None else None
        try:
            yield
        finally:
            host_s = time.perf_counter() - began
            self._phases_s[name] += host_s
            if on_device is not None:
                self._marks.append((name, host_s, begin, on_device.mark()))

    def stop(self, waits: bool = False) -> tuple[float, dict[str, float]]:
        """Return (duration of the step, duration by phase); `host` is the time outside all phases.

        waits: the step ends when the device has finished it; for steps after which nothing is read from the device.
        """
        if self._clock is not None and self._marks:
            if waits:
                began = time.perf_counter()
                self._clock.wait(self._marks[-1][-1])
                self._phases_s[_PARTS] += time.perf_counter() - began
            for name, host_s, begin, end in self._marks:
                device_s = self._clock.seconds(begin, end)
                if device_s is not None:
                    self._phases_s[name] += device_s - host_s
        self.stopped = time.perf_counter()
        wall_s = self.stopped - self.started
        phases_s = dict(self._phases_s)
        self.parts_s = phases_s.pop(_PARTS)
        phases_s["host"] = max(0.0, wall_s - sum(phases_s.values()))
        return wall_s, phases_s


class Pace:
    """Ratio of measured to predicted durations: the load of other processes.

    Other processes delay single steps. The model of step times takes these for exceptions, so that they decide nothing,
    but they would have delayed plain decoding by as large a share.
    """

    def __init__(self) -> None:
        self._taken_s = self._predicted_s = 0.0
        self._shape: Shape | None = None
        self._num_alike = 0

    @property
    def ratio(self) -> float:
        """Return the ratio of recent steps; 1 before the first ones."""
        return self._taken_s / self._predicted_s if self._predicted_s else 1.0

    def load(self, work: StepWork, taken_s: float, predicted_s: float) -> float:
        """Count a step and return its ratio.

        A step that reads prompts, or that follows one with other passes of the draft model, has the ratio of recent
        steps: its own excess is the prompts' or the drafts', not another process's.
        """
        shape = work.shape if work.passes else PLAIN
        self._num_alike = self._num_alike + 1 if shape == self._shape else 0
        self._shape = shape
        if self._num_alike < _LEAST_ALIKE or work.prompt:
            return self.ratio
        if not self._predicted_s:
            self._taken_s = self._predicted_s = _PACE_STEPS / 4 * predicted_s
        keep = 1 - 1 / _PACE_STEPS
        self._taken_s = keep * self._taken_s + taken_s
        self._predicted_s = keep * self._predicted_s + predicted_s
        return taken_s / predicted_s


@dataclass(frozen=True)
class StepDurations:
    """Measured times of one step, in seconds."""

    wall_s: float
    draft_s: float
    rest_s: float
    """Time of the step's parts except drafting."""
    host_s: float
    """Time around its parts, without the controller."""
    started_s: float
    follows: bool
    """Whether it followed another step at once."""


@dataclass(frozen=True)
class PlainTimes:
    """Times that plain decoding would have taken in place of a step; see `StepStats`."""

    plain_s: float | None = None
    usual_plain_s: float = 0.0
    prompt_s: float = 0.0


class Telemetry:
    """Measures the steps of one engine."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self.stopwatch = Stopwatch(CudaClock() if device.type == "cuda" else None)
        self.phase = self.stopwatch.phase
        self.num_steps = 0
        self.is_eager = False
        """Whether the operations of the present step are launched one by one."""
        self._scheduler = scheduler
        self._last_stopped: float | None = None
        """End of the last step if this one follows it at once."""
        self._controlled_s = 0.0
        self._pace = Pace()

    def end_step(self, num_awaiting_grammar: int) -> Callable[[], StepStats]:
        """End the step that began last; return the rest of the work, which learns from its times and makes its
        statistics. It must be called once, before the next step is committed.

        num_awaiting_grammar: requests whose grammars are being read.
        """
        watch, scheduler = self.stopwatch, self._scheduler
        wall_s, phases_s = watch.stop(waits=not scheduler.last_plan.sampling_rows)
        self.num_steps += 1
        follows = self._last_stopped is not None
        wall_s += watch.started - self._last_stopped if self._last_stopped is not None else 0.0
        self._last_stopped = watch.stopped if scheduler.has_work else None
        # Plain decoding has the same planning and messages, without the controller.
        host_s = wall_s - watch.parts_s - self._controlling_s()
        draft_s = phases_s["draft"]
        rest_s = watch.parts_s - draft_s
        measured = StepDurations(wall_s, draft_s, rest_s, host_s, watch.started, follows)
        plan, is_eager = scheduler.last_plan, self.is_eager
        now = self.stats(num_awaiting_grammar, wall_s, phases_s)

        # The next plan may preempt them before this step is learnt from.
        reading = [scheduler.running(row.sequence_id) for row in plan.rows if not row.emits]

        def learn() -> StepStats:
            plain = self._learn(plan, measured, is_eager)
            if plain.plain_s is not None:
                for sequence in reading:
                    if sequence is not None:
                        sequence.note_reading(wall_s, plain.plain_s + plain.prompt_s)
            return replace(now, plain_s=plain.plain_s, usual_plain_s=plain.usual_plain_s, prompt_s=plain.prompt_s)

        return learn

    def pause(self) -> None:
        """Note that the next step does not follow the last one at once: it is not charged for the time between them."""
        self._last_stopped = None

    def stats(
        self,
        num_awaiting_grammar: int,
        wall_s: float = 0.0,
        phases_s: dict[str, float] | None = None,
    ) -> StepStats:
        """Return the state, with the times of the last step if there was one."""
        scheduler = self._scheduler
        return StepStats(
            wall_s=wall_s,
            plain_s=None,
            usual_plain_s=0.0,
            prompt_s=0.0,
            phases_s=phases_s or {},
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_awaiting_grammar,
            num_blocks_used=scheduler.tables.target.num_used,
            num_preemptions=scheduler.num_preemptions,
            num_cache_queries=scheduler.num_cache_queries,
            num_cache_hits=scheduler.num_cache_hits,
            num_steps=self.num_steps,
        )

    def _controlling_s(self) -> float:
        """Return the time that the controller has run since the last call."""
        controller = self._scheduler.controller
        before_s, self._controlled_s = self._controlled_s, controller.spent_s if controller is not None else 0.0
        return max(0.0, self._controlled_s - before_s)

    def _learn(self, plan: Plan, measured: StepDurations, is_eager: bool) -> PlainTimes:
        """Return the times of plain decoding in place of this step, and learn from its durations."""
        times = self._scheduler.times
        if times is None:
            return PlainTimes()
        if not plan.sampling_rows:
            return PlainTimes(plain_s=0.0, prompt_s=measured.rest_s + measured.host_s)
        work = replace(StepWork.of(plan), is_eager=is_eager)
        # Without its drafts such a step may not be recorded, either.
        plain = replace(
            work.plain,
            is_eager=(is_eager and any(row.needs & DISTRIBUTION_NEEDS for row in plan.sampling_rows)) or None,
        )
        usual_plain_s, predicted_s = (float(step_s) for step_s in times.step_s([plain, work]))
        prompt_s = self._prompt_s(plan, work, measured) if work.prompt else 0.0
        load = self._pace.ratio
        if measured.follows:
            taken_s = measured.draft_s + measured.rest_s + measured.host_s
            load = self._pace.load(work, taken_s, predicted_s)
        # Whatever delayed this step, it contained the work of a plain one.
        most_s = measured.wall_s - max(0.0, prompt_s)
        plain_s = min(load * usual_plain_s, most_s)
        host_s = measured.host_s if measured.follows else None
        times.observe(work, measured.draft_s, measured.rest_s, measured.started_s, host_s)
        return PlainTimes(plain_s, usual_plain_s, prompt_s)

    def _prompt_s(self, plan: Plan, work: StepWork, measured: StepDurations) -> float:
        """Return the part of a step's time that its prompts took, at most all of it."""
        times = self._scheduler.times
        assert times is not None
        # Without its prompts such a step may not be recorded, either.
        is_eager = bool(work.is_eager) and any(row.needs for row in plan.sampling_rows)
        usual_s = times.rest_s(replace(work.without_prompts, is_eager=is_eager or None))
        # The same tokens take another time in a pass that has no drafts. What is known of shapes is about drafts.
        drafting = replace(work, shape=PLAIN)
        with_drafts_s = times.rest_s(drafting) - times.rest_s(drafting.without_prompts)
        alone_s = times.rest_s(work.without_drafts) - times.rest_s(work.plain)
        # Noise may make it negative; sums over many steps are right.
        prompt_s = (measured.rest_s - usual_s) * (alone_s / with_drafts_s if with_drafts_s > 0 else 1.0)
        if measured.follows:  # requests are admitted
            prompt_s += measured.host_s - times.host.usual_s(work)
        return min(prompt_s, measured.wall_s)
