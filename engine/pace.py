"""How long plain decoding would take now, and what prompts add to a step, told by the steps that are made.

A Kalman filter of logarithms: how slow the machine is over how it was measured, which wanders, and by size what such
steps take beyond the measured plain ones, which hardly changes. An engine that speculates makes few plain steps, yet
each of its steps says how the machine is, beside what steps of its size usually take; plain steps say how plain ones
compare. All without the time of the draft model: what it does, and reads, plain decoding does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.metrics import PlainTimes

_NOISE = 0.25**2
"""Variance of a step's time, times what it says less for being like its neighbours'."""
_MACHINE, _WANDERS, _LONGEST_S = 0.1**2, 0.1**2 / 60, 60.0
"""Variance of what the machine is like at first, and what a second adds; more than a minute adds no more."""
_PLAIN, _DRAFTING, _SHIFTS = 0.05**2, 0.4**2, 0.03**2 / 600
"""Variance of what sizes take beyond measured plain steps, those with drafts and without, and what a second adds."""
_USUAL = 0.3
"""What is believed of drafting ones."""
_MOST_SIZES = 64
_NEAR = 0.5
"""Octaves of nodes a row by which sizes may differ to stand for each other."""


@dataclass(frozen=True)
class Step:
    """A step that was made."""

    started: float
    """On a clock of seconds."""
    seconds: float
    """Of its parts, without drafting."""
    num_rows: int
    """That emit."""
    context: float
    """Their mean."""
    num_nodes: int
    """Drafted, of all rows."""
    has_prompts: bool
    is_behind: bool
    """The draft model reads what plain decoding has left unread."""


class Beside(NamedTuple):
    """A step beside plain decoding, in seconds."""

    plain_s: float
    """What the parts of a plain step of its rows would take."""
    prompt_s: float
    """What its prompts took, by chance below 0: the sum counts."""


class Pace:
    """Follows the steps of an engine."""

    def __init__(self, plain: PlainTimes) -> None:
        """plain: what was measured at start."""
        self.plain = plain
        self._places: dict[tuple[int, int], int] = {}
        """Of sizes in the state, the one that was met last at the end."""
        self._state = np.zeros(1)
        self._variance = np.array([[_MACHINE]])
        self._last_started: float | None = None
        self._was_plain = False

    def plain_s(self, num_rows: int, context: float) -> float:
        """What the parts of a plain step of so many rows would take now."""
        return self.plain.step_s(num_rows, context) * self._times(_size(num_rows, 0))

    def add(self, step: Step) -> Beside | None:
        """Take in a step; None where what its prompts took is not known, as no steps of its size are."""
        size = _size(step.num_rows, step.num_nodes)
        plain_s = self.plain_s(step.num_rows, step.context)
        is_plain = not (step.num_nodes or step.has_prompts or step.is_behind)
        was_plain, self._was_plain = self._was_plain, is_plain
        self._wander(step.started)
        measured_s = self.plain.step_s(step.num_rows, step.context)
        if step.has_prompts:
            near = self._nearest(size)
            return Beside(plain_s, step.seconds - self._times(near) * measured_s) if near is not None else None
        # A plain step behind others finds other weights in the caches.
        if step.num_nodes or (is_plain and was_plain):
            self._observe(size, step.seconds / measured_s)
        return Beside(plain_s, 0.0)

    def _times(self, size: tuple[int, int]) -> float:
        """What such a step takes now over the measured plain one."""
        beyond = self._state[self._places[size]] if size in self._places else 0.0
        return math.exp(self._state[0] + beyond)

    def _wander(self, started: float) -> None:
        if self._last_started is not None:
            seconds = min(_LONGEST_S, max(0.0, started - self._last_started))
            self._variance[np.diag_indices_from(self._variance)] += _SHIFTS * seconds
            self._variance[0, 0] += _WANDERS * seconds
        self._last_started = started

    def _observe(self, size: tuple[int, int], times: float) -> None:
        place = self._places.pop(size, None)
        if place is None:
            place = self._new_place(size)
            if size[1]:
                self._places[size] = place
                return  # the first of a size may have something to warm up
        self._places[size] = place
        # A step that has met another process is no rule.
        news = min(1.0, max(-0.5, times / self._times(size) - 1))
        covariance = self._variance[0] + self._variance[place]
        gain = covariance / (covariance[0] + covariance[place] + _NOISE)
        self._state += gain * news
        self._variance -= np.outer(gain, covariance)

    def _new_place(self, size: tuple[int, int]) -> int:
        """In the state, with what is believed of such steps; of the size that was met longest ago if it is full."""
        if len(self._places) == _MOST_SIZES:
            place = self._places.pop(next(iter(self._places)))
        else:
            place = len(self._state)
            self._state, self._variance = np.pad(self._state, (0, 1)), np.pad(self._variance, ((0, 1), (0, 1)))
        self._state[place] = _USUAL if size[1] else 0.0
        self._variance[place] = self._variance[:, place] = 0.0
        self._variance[place, place] = _DRAFTING if size[1] else _PLAIN
        return place

    def _nearest(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """The nearest size that is known: while one of several reads, fewer draft."""
        num_rows, num_nodes = size
        if not num_nodes:
            return size
        near = []
        for known, place in self._places.items():
            rows_apart = abs(known[0] - num_rows)
            if known[1] and rows_apart <= 1 and self._variance[place, place] < _DRAFTING / 2:
                nodes_apart = abs(math.log2(known[1] / num_nodes))
                if nodes_apart <= _NEAR:
                    near.append((rows_apart + nodes_apart, known))
        return min(near)[1] if near else None


def _size(num_rows: int, num_nodes: int) -> tuple[int, int]:
    """(octave of rows, nodes a row) of steps that take about the same; no nodes where nothing is drafted."""
    return round(math.log2(num_rows)), max(min(1, num_nodes), round(num_nodes / num_rows))
