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

from engine.control.step_work import PLAIN, Shape, StepWork
from engine.needs import DISTRIBUTION_NEEDS
from engine.plan import Plan
from engine.scheduling.outcome import PHASES, StepStats
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

_PARTS = "parts"
_PACE_STEPS = 100.0
"""Number of steps after which about a third of a step's influence on the pace remains."""
_LEAST_ALIKE = 4
"""Steps of a shape before those whose caches are warm."""


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
        self.parts_s = 0.0
        """Time of the last step's parts, without planning."""

    def start(self) -> None:
        """Begin a step."""
        self._phases_s = dict.fromkeys((*PHASES, _PARTS), 0.0)
        self._marks: list[PhaseMarks] = []
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for a phase."""
        began = time.perf_counter()
        clock = None
        begin = None
        if self._clock is not None and name != _PARTS:
            clock = self._clock
            begin = clock.mark()
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
        self.parts_s = phases_s.pop(_PARTS)
        phases_s["host"] = max(0.0, wall_s - sum(phases_s.values()))
        return wall_s, phases_s

    def _use_device_times(self, clock: CudaClock, waits: bool) -> None:
        """Replace the host's time of every finished phase by the time of the device."""
        if waits:
            began = time.perf_counter()
            clock.wait(self._marks[-1].end)
            self._phases_s[_PARTS] += time.perf_counter() - began
        for phase in self._marks:
            device_s = clock.seconds(phase.begin, phase.end)
            if device_s is not None:
                self._phases_s[phase.name] += device_s - phase.host_s


class Pace:
    """Ratio of measured to predicted durations: the load of other processes.

    Other processes delay single steps. The model of step times ignores delayed steps as exceptions,
    but the processes would have delayed plain decoding by as large a share.
    """

    def __init__(self) -> None:
        self._taken_s = 0.0
        self._predicted_s = 0.0
        self._shape: Shape | None = None
        self._num_alike = 0

    @property
    def ratio(self) -> float:
        """Return the ratio of recent steps; 1 before any step was counted."""
        if not self._predicted_s:
            return 1.0
        return self._taken_s / self._predicted_s

    def load(self, work: StepWork, taken_s: float, predicted_s: float) -> float:
        """Count a step and return its ratio.

        The ratio of recent steps is returned for a step that reads prompts, and for a step after a
        step with other passes of the draft model. Prompts or drafts cause the excess time of such
        a step, not another process.
        """
        shape = work.shape if work.passes else PLAIN
        if shape == self._shape:
            self._num_alike += 1
        else:
            self._num_alike = 0
        self._shape = shape
        if self._num_alike < _LEAST_ALIKE or work.prompt:
            return self.ratio
        if not self._predicted_s:
            self._predicted_s = _PACE_STEPS / 4 * predicted_s
            self._taken_s = self._predicted_s
        decay = 1 - 1 / _PACE_STEPS
        self._taken_s = decay * self._taken_s + taken_s
        self._predicted_s = decay * self._predicted_s + predicted_s
        return taken_s / predicted_s


@dataclass(frozen=True)
class StepDurations:
    """Measured times of one step, in seconds."""

    wall_s: float
    draft_s: float
    rest_s: float
    """Time of the step's parts except drafting."""
    host_s: float
    """Time outside the step's parts, without the controller."""
    started_s: float
    follows: bool
    """Whether it followed another step at once."""

    @property
    def work_s(self) -> float:
        """Return the time of the step without the controller."""
        return self.draft_s + self.rest_s + self.host_s


@dataclass(frozen=True)
class PlainTimes:
    """Times that plain decoding would have taken in place of a step; see `StepStats`."""

    plain_s: float | None = None
    usual_plain_s: float = 0.0
    prompt_s: float = 0.0


@dataclass(frozen=True)
class MeasuredStep:
    """A step that has ended, for `Telemetry.learn`."""

    plan: Plan
    durations: StepDurations
    is_eager: bool
    """Whether no recorded step carried out the plan; always true on a CPU."""
    reading: list[Sequence]
    """Sequences whose texts the step read without an emission."""
    stats: StepStats
    """Statistics of the step, without the times of plain decoding."""


class Telemetry:
    """Measures the steps of one engine."""

    def __init__(self, scheduler: Scheduler, device: torch.device) -> None:
        self.stopwatch = Stopwatch(CudaClock() if device.type == "cuda" else None)
        self.phase = self.stopwatch.phase
        self.num_steps = 0
        self.is_eager = False
        """Whether no recorded step carries out the present plan; always true on a CPU."""
        self._scheduler = scheduler
        self._last_stopped: float | None = None
        """End of the last step if this one follows it at once."""
        self._controlled_s = 0.0
        self._pace = Pace()

    def end_step(self, num_awaiting_grammar: int) -> MeasuredStep:
        """End the step that began last; `learn` must be called before the next step is committed.

        num_awaiting_grammar: requests whose grammars are being read.
        """
        watch = self.stopwatch
        scheduler = self._scheduler
        plan = scheduler.last_plan
        wall_s, phases_s = watch.stop(waits=not plan.sampling_rows)
        self.num_steps += 1
        follows = self._last_stopped is not None
        if self._last_stopped is not None:
            wall_s += watch.started - self._last_stopped
        self._last_stopped = watch.stopped if scheduler.has_work else None
        draft_s = phases_s["draft"]
        durations = StepDurations(
            wall_s=wall_s,
            draft_s=draft_s,
            rest_s=watch.parts_s - draft_s,
            # Plain decoding has the same planning and messages, without the controller.
            host_s=wall_s - watch.parts_s - self._controlling_s(),
            started_s=watch.started,
            follows=follows,
        )
        # The next plan may preempt the sequences before `learn` is called.
        running = [scheduler.running(row.sequence_id) for row in plan.rows if not row.emits]
        return MeasuredStep(
            plan=plan,
            durations=durations,
            is_eager=self.is_eager,
            reading=[sequence for sequence in running if sequence is not None],
            stats=self.stats(num_awaiting_grammar, wall_s, phases_s),
        )

    def learn(self, step: MeasuredStep) -> StepStats:
        """Let the model of step times learn from a step; return its statistics with plain times.

        Must be called once for every step.
        """
        plain = self._learn(step.plan, step.durations, step.is_eager)
        if plain.plain_s is not None:
            for sequence in step.reading:
                sequence.note_reading(step.durations.wall_s, plain.plain_s + plain.prompt_s)
        return replace(
            step.stats,
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
        before_s = self._controlled_s
        self._controlled_s = 0.0 if controller is None else controller.spent_s
        return max(0.0, self._controlled_s - before_s)

    def _learn(self, plan: Plan, measured: StepDurations, is_eager: bool) -> PlainTimes:
        """Return the times of plain decoding in place of this step; learn from its durations."""
        times = self._scheduler.times
        if times is None:
            return PlainTimes()
        if not plan.sampling_rows:
            return PlainTimes(plain_s=0.0, prompt_s=measured.rest_s + measured.host_s)
        work = replace(StepWork.of(plan), is_eager=is_eager)
        # No recorded step meets the needs of these rows, with or without drafts.
        stays_eager = is_eager and any(row.needs & DISTRIBUTION_NEEDS for row in plan.sampling_rows)
        plain = replace(work.plain, is_eager=stays_eager or None)
        usual_plain_s, predicted_s = (float(step_s) for step_s in times.step_s([plain, work]))
        prompt_s = self._prompt_s(plan, work, measured) if work.prompt else 0.0
        load = self._pace.ratio
        host_s = None
        if measured.follows:
            load = self._pace.load(work, measured.work_s, predicted_s)
            host_s = measured.host_s
        # Whatever delayed this step, it contained the work of a plain one.
        plain_s = min(load * usual_plain_s, measured.wall_s - prompt_s)
        times.observe(work, measured.draft_s, measured.rest_s, measured.started_s, host_s)
        return PlainTimes(plain_s, usual_plain_s, prompt_s)

    def _prompt_s(self, plan: Plan, work: StepWork, measured: StepDurations) -> float:
        """Return the part of a step's time that its prompts took; at most the whole time."""
        times = self._scheduler.times
        assert times is not None
        # A step of rows with needs may be launched eagerly without prompts, too.
        stays_eager = bool(work.is_eager) and any(row.needs for row in plan.sampling_rows)
        usual_s = times.rest_s(replace(work.without_prompts, is_eager=stays_eager or None))
        # Prompt tokens take another time in a pass without drafts. The difference comes from works
        # of no shape, because the model knows shapes for drafts alone.
        shapeless = replace(work, shape=PLAIN)
        with_drafts_s = times.rest_s(shapeless) - times.rest_s(shapeless.without_prompts)
        alone_s = times.rest_s(work.without_drafts) - times.rest_s(work.plain)
        prompt_s = measured.rest_s - usual_s + alone_s - with_drafts_s
        if measured.follows:  # admission of the prompts' requests
            prompt_s += measured.host_s - times.host.usual_s(work)
        # On a machine that is faster than at calibration this is negative for few tokens.
        return min(max(0.0, prompt_s), measured.wall_s)
