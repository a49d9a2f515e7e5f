"""How long plain decoding would take now, and what prompts add to a step, told by the steps that are made.

Levels (`levels.py`) of the machine, and by size of what such steps take over the measured plain ones. An engine that
speculates makes few plain steps, yet each of its steps says how the machine is, beside what steps of its size usually
take; plain steps say how plain ones compare. All without the time of the draft model: what it does, and reads, plain
decoding does not.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from engine.levels import Levels
from engine.metrics import PlainTimes

_PLAIN, _DRAFTING, _USUAL = 0.05**2, 0.4**2, 1.35
"""Variance (of logarithms) of what sizes take beyond measured plain steps, without drafts and with; and what is
believed of those with drafts.
"""
_FORGETS_S = 7200.0
_NEAR = 0.5
"""Octaves of nodes a row by which sizes may differ to stand for each other."""

Size = tuple[int, int]
"""(octave of rows, nodes a row) of steps that take about the same; no nodes where nothing is drafted."""


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
        self._levels = Levels(_FORGETS_S)
        self._last_started: float | None = None
        self._was_plain = False

    def add(self, step: Step) -> Beside | None:
        """Take in a step; None where what its prompts took is not known, as no steps of its size are."""
        size = _size(step.num_rows, step.num_nodes)
        measured_s = self.plain.step_s(step.num_rows, step.context)
        plain_s = measured_s * self._levels.times([_size(step.num_rows, 0)])
        is_plain = not (step.num_nodes or step.has_prompts or step.is_behind)
        was_plain, self._was_plain = self._was_plain, is_plain
        if self._last_started is not None:
            self._levels.pass_time(step.started - self._last_started)
        self._last_started = step.started
        if step.has_prompts:
            near = self._nearest(size)
            known_s = self._levels.times([near]) * measured_s if near is not None else None
            return Beside(plain_s, step.seconds - known_s) if known_s is not None else None
        # A plain step behind others finds other weights in the caches.
        if step.num_nodes or (is_plain and was_plain):
            self._observe(size, step.seconds / measured_s)
        return Beside(plain_s, 0.0)

    def _observe(self, size: Size, times: float) -> None:
        if size not in self._levels:
            if size[1]:
                self._levels.begin(size, _DRAFTING, _USUAL)
                return  # the first of a size may have something to warm up
            self._levels.begin(size, _PLAIN)
        self._levels.observe([size], times)

    def _nearest(self, size: Size) -> Size | None:
        """The nearest size that is known: while one of several reads, fewer draft."""
        octave, num_nodes = size
        if not num_nodes:
            return size
        near = []
        for known in itertools.product(range(octave - 1, octave + 2), _near_nodes(num_nodes)):
            if known in self._levels and self._levels.variance([known]) < _DRAFTING / 2:
                near.append((abs(known[0] - octave) + abs(math.log2(known[1] / num_nodes)), known))
        return min(near)[1] if near else None


def _size(num_rows: int, num_nodes: int) -> Size:
    return round(math.log2(num_rows)), max(min(1, num_nodes), round(num_nodes / num_rows))


def _near_nodes(num_nodes: int) -> range:
    """Nodes a row that differ by no more than half an octave."""
    return range(math.ceil(num_nodes / 2**_NEAR), math.floor(num_nodes * 2**_NEAR) + 1)
