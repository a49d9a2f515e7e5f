"""Measurements of a running engine: times of each step, and times of plain decoding in its place.

The engine reports when a step begins and ends, and which part runs. Nothing here changes what a
step does. The model of step times learns from every step. Answers and dashboards get the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from engine.control.step_work import StepWork
from engine.plan import Plan
from engine.scheduling.outcome import PHASES, StepStats
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence


class CudaClock:
    """Clock of a CUDA device, whose marks are events of the stream.

    The host continues while the device still works.
    """

    def mark(self) -> torch.cuda.Event:
        """Return the moment at which the stream has finished all work given so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Return the time between two marks; None if the stream has not reached the end mark."""
        if not end.query():  # type: ignore[no-untyped-call]
            return None
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the stream has reached a mark."""
        mark.synchronize()


class PhaseMarks(NamedTuple):
    """A phase with the marks of the device's clock at its begin and end."""

    name: str
    host_s: float
    begin: Any
    end: Any


class Stopwatch:
    """Times a step and its phases.

    On a device the device's clock is used, because the host may finish a phase much earlier.
    """

    def __init__(self, clock: CudaClock | None = None) -> None:
        self._clock = clock
        self.start()
        self.stopped = self.started

    def start(self) -> None:
        """Begin a step."""
        self._phases_s = dict.fromkeys(PHASES, 0.0)
        self._marks: list[PhaseMarks] = []
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for a phase."""
        began = time.perf_counter()
        clock = self._clock
        begin = None if clock is None else clock.mark()
        try:
            yield
        finally:
            host_s = time.perf_counter() - began
            self._phases_s[name] += host_s
            if clock is not None:
                self._marks.append(PhaseMarks(name, host_s, begin, clock.mark()))

    def stop(self, waits: bool = False) -> tuple[float, dict[str, float]]:
        """Return (duration of the step, duration by phase); `host` is the time outside all phases.

        waits: whether to wait until the device has finished the step. It is needed after steps
        from which the host reads nothing.
        """
        if self._clock is not None and self._marks:
            self._use_device_times(self._clock, waits)
        self.stopped = time.perf_counter()
        wall_s = self.stopped - self.started
        phases_s = dict(self._phases_s)
        phases_s["host"] = max(0.0, wall_s - sum(phases_s.values()))
        return wall_s, phases_s

    def _use_device_times(self, clock: CudaClock, waits: bool) -> None:
        """Replace the host's time of every finished phase by the time of the device."""
        if waits:
            clock.wait(self._marks[-1].end)
        for phase in self._marks:
            device_s = clock.seconds(phase.begin, phase.end)
            if device_s is not None:
                self._phases_s[phase.name] += device_s - phase.host_s


@dataclass(frozen=True)
class MeasuredStep:
    """A step that has ended, for `Telemetry.learn`."""

    plan: Plan
    ended_s: float
    between_s: float | None
    """Part of its time before it began, for messages and planning; None if no step was just before
    it.
    """
    reading: list[Sequence]
    """Sequences whose texts the step read without an emission."""
    stats: StepStats
    """Without the times of plain decoding."""


class Telemetry:
    """Measures the steps of one engine."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self.stopwatch = Stopwatch(CudaClock() if device.type == "cuda" else None)
        self.phase = self.stopwatch.phase
        self.num_steps = 0
        self._scheduler = scheduler
        self._last_stopped: float | None = None
        """End of the last step if this one follows at once."""

    def end_step(self, num_awaiting_grammar: int) -> MeasuredStep:
        """End the step that began last; `learn` must be called before the next step is committed.

        num_awaiting_grammar: requests whose grammars are being read.
        """
        watch = self.stopwatch
        scheduler = self._scheduler
        plan = scheduler.last_plan
        wall_s, phases_s = watch.stop(waits=not plan.sampling_rows)
        self.num_steps += 1
        between_s = None
        if self._last_stopped is not None:
            between_s = watch.started - self._last_stopped
            wall_s += between_s
        self._last_stopped = watch.stopped if scheduler.has_work else None
        # The next plan may preempt the sequences before `learn` is called.
        running = [scheduler.running(row.sequence_id) for row in plan.rows if not row.emits]
        return MeasuredStep(
            plan=plan,
            ended_s=watch.stopped,
            between_s=between_s,
            reading=[sequence for sequence in running if sequence is not None],
            stats=self.stats(num_awaiting_grammar, wall_s, phases_s),
        )

    def learn(self, step: MeasuredStep) -> StepStats:
        """Let the step times learn from a step; return its statistics with plain times.

        Must be called once for every step.
        """
        times = self._scheduler.times
        if times is None:
            return step.stats
        stats = step.stats
        work = StepWork.of(step.plan)
        plain = times.observe(work, stats.wall_s, stats.phases_s["draft"], step.ended_s, step.between_s)
        if plain.plain_s is not None:
            for sequence in step.reading:
                sequence.note_reading(stats.wall_s, plain.plain_s + plain.prompt_s)
        return replace(
            stats,
            plain_s=plain.plain_s,
            usual_plain_s=plain.usual_plain_s,
            prompt_s=plain.prompt_s,
        )

    def pause(self) -> None:
        """Do not charge the next step for the time since the last step."""
        self._last_stopped = None

    def stats(
        self,
        num_awaiting_grammar: int,
        wall_s: float = 0.0,
        phases_s: dict[str, float] | None = None,
    ) -> StepStats:
        """Return the state, with the times of the last step if there was one."""
        scheduler = self._scheduler
        states = scheduler.tables.state_stores
        return StepStats(
            wall_s=wall_s,
            plain_s=None,
            usual_plain_s=0.0,
            prompt_s=0.0,
            phases_s=phases_s or {},
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + num_awaiting_grammar,
            num_blocks_used=scheduler.tables.target.num_used,
            num_states_used=sum(store.num_used for store in states),
            num_preemptions=scheduler.num_preemptions,
            num_cache_queries=scheduler.num_cache_queries,
            num_cache_hits=scheduler.num_cache_hits,
            num_state_hits=sum(store.num_hits for store in states),
            num_state_evictions=sum(store.num_evicted for store in states),
            num_steps=self.num_steps,
        )
