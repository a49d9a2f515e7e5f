"""Measurements of a running engine: times of each step, and the time that plain decoding would have taken.

The engine reports when a step begins and ends, and which part runs. Nothing here changes what a step does. The model of
step times learns from every step. Answers and dashboards get the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from engine.control.step_work import StepWork
from engine.scheduling.outcome import PHASES, StepStats
from engine.scheduling.scheduler import Scheduler

_PARTS = "parts"
_NEW_WEIGHT = 0.05
"""Weight of the newest step in the moving average of host time."""


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
        self._marks: list[tuple[str, float, Any, Any]] = []
        self._phases_s = dict.fromkeys((*PHASES, _PARTS), 0.0)
        self.started = self.stopped = time.perf_counter()
        self.parts_s = 0.0
        """Time of the last step's parts; the rest was planning."""

    def start(self) -> None:
        """Begin a step."""
        self._phases_s = dict.fromkeys((*PHASES, _PARTS), 0.0)
        self._marks = []
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


class HostTime(NamedTuple):
    """Seconds of host work outside the parts of a step."""

    before: float
    """Between the last step and this one; 0 if this one did not follow it at once."""
    usual: float
    """Planning and messages of a usual step; plain decoding needs them too."""


class Overhead:
    """Host time of steps: planning a step, and the messages between two steps."""

    def __init__(self) -> None:
        self._last_stopped: float | None = None
        self._usual_s: float | None = None

    def add(self, stopwatch: Stopwatch, goes_on: bool, aside_s: float = 0.0) -> HostTime:
        """Count a step. goes_on: whether another one follows at once.

        aside_s: host time of this step that plain decoding would not need (choosing shapes).
        """
        before_s = 0.0
        if self._last_stopped is not None:
            before_s = stopwatch.started - self._last_stopped
            around_s = before_s + stopwatch.stopped - stopwatch.started - stopwatch.parts_s - aside_s
            usual_s = around_s if self._usual_s is None else self._usual_s
            # A very long wait had another cause: it counts as four usual ones at most.
            self._usual_s = usual_s + _NEW_WEIGHT * (min(around_s, 4 * usual_s) - usual_s)
        self._last_stopped = stopwatch.stopped if goes_on else None
        return HostTime(before_s, self._usual_s or 0.0)

    def pause(self) -> None:
        """Note that the next step does not follow the last one at once: it is not charged for the time between them."""
        self._last_stopped = None


class Telemetry:
    """Measures the steps of one engine."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self.stopwatch = Stopwatch(CudaClock() if device.type == "cuda" else None)
        self.phase = self.stopwatch.phase
        self.num_steps = 0
        self._scheduler = scheduler
        self.overhead = Overhead()
        """Host time outside the parts of steps; may be shared with another engine of the same models."""
        self._controlled_s = 0.0

    def begin_step(self) -> None:
        """Begin a step."""
        self.stopwatch.start()

    def end_step(self, num_awaiting_grammar: int) -> StepStats:
        """End the step that began last. num_awaiting_grammar: requests whose grammars are being read."""
        wall_s, phases_s = self.stopwatch.stop(waits=not self._scheduler.last_plan.sampling_rows)
        self.num_steps += 1
        # Plain decoding has the same planning and messages, without the controller.
        around_s = self.overhead.add(self.stopwatch, self._scheduler.has_work, self._controlling_s())
        plain_s, prompt_s = self._learn(phases_s["draft"], self.stopwatch.parts_s - phases_s["draft"], around_s.usual)
        return self.stats(num_awaiting_grammar, wall_s + around_s.before, plain_s, prompt_s, phases_s)

    def pause(self) -> None:
        """Note that the next step does not follow the last one at once."""
        self.overhead.pause()

    def stats(
        self,
        num_awaiting_grammar: int,
        wall_s: float = 0.0,
        plain_s: float | None = None,
        prompt_s: float = 0.0,
        phases_s: dict[str, float] | None = None,
    ) -> StepStats:
        """Return the state, with the times of the last step if there was one."""
        scheduler = self._scheduler
        return StepStats(
            wall_s=wall_s,
            plain_s=plain_s,
            prompt_s=prompt_s,
            phases_s=phases_s or {},
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_awaiting_grammar,
            num_blocks_used=scheduler.blocks.num_used,
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

    def _learn(self, draft_s: float, rest_s: float, around_s: float) -> tuple[float | None, float]:
        """Return (duration of a plain step over the last plan's rows that emit, time of that plan's prompts).

        It is (None, 0) if no times were measured or nothing was emitted. draft_s, rest_s: times of the step's parts;
        around_s: usual time between the parts of two steps.
        """
        times, plan = self._scheduler.times, self._scheduler.last_plan
        if times is None or not plan.sampling_rows:
            return None, 0.0
        work = StepWork.of(plan)
        plain_s = times.rest_s(work.plain) + around_s
        # Noise may make it negative; sums over many steps are right.
        prompt_s = rest_s - times.rest_s(work.without_prompts) if work.prompt else 0.0
        times.host_s = around_s
        times.observe(work, draft_s, rest_s, self.stopwatch.started)
        return plain_s, prompt_s
