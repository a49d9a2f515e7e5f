"""Counters and times of a step, kept where they happen and sent with each step's events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec

PHASES = ("draft", "target", "verify", "keep", "host")
_PARTS = "parts"
_NEWS = 0.05
"""Weight of a new observation."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine after a step; times in seconds, counts since start unless said."""

    wall_s: float
    """Duration of this step."""
    plain_s: float | None
    """What a plain decoding step of the rows that emit takes, at their contexts; None where no steps were measured."""
    prompt_s: float
    """How much of this step went into prompts, which plain decoding would have to read as well; by chance below 0."""
    phases_s: dict[str, float]
    """Duration of this step by phase (`PHASES`)."""
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_preemptions: int
    num_cache_queries: int
    """Tokens of admitted texts."""
    num_cache_hits: int
    """Those of them whose K/V was there."""
    num_steps: int


class DeviceClock(Protocol):
    """Time as a device sees it: the host goes on while the device still works on what it was given."""

    def mark(self) -> Any:
        """The moment at which the device has done all it was given so far."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Time between two marks; None where the device has not come to the second one yet."""

    def wait(self, mark: Any) -> None:
        """Until the device has come to a mark."""


class Stopwatch:
    """Times a step and its phases: on a device by its own clock, as the host may be done with a phase long before."""

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self._clock = clock
        self._marks: list[tuple[str, float, Any, Any]] = []
        self._phases_s = dict.fromkeys((*PHASES, _PARTS), 0.0)
        self.started = self.stopped = time.perf_counter()
        self.parts_s = 0.0
        """How much of the last step its parts took; the rest was planning."""

    def start(self) -> None:
        """Begin a step."""
        self._phases_s = dict.fromkeys((*PHASES, _PARTS), 0.0)
        self._marks = []
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts for this phase."""
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
        """(duration of the step, duration by phase); `host` is whatever no phase claims.

        waits: the step ends when the device is done with it; for steps after which nothing is read from it.
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
    """Between the last step and this one; 0 where this one did not follow it at once."""
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
            # A very long wait was for something else: it counts as four usual ones at most.
            self._usual_s = usual_s + _NEWS * (min(around_s, 4 * usual_s) - usual_s)
        self._last_stopped = stopwatch.stopped if goes_on else None
        return HostTime(before_s, self._usual_s or 0.0)

    def pause(self) -> None:
        """The next step does not follow the last one at once: do not charge the time between them to it."""
        self._last_stopped = None
