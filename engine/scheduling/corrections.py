"""How far steps are from what was predicted of them, by shape: what was measured at start is few runs of few shapes.

Levels (`engine/levels.py`) of the machine, of drafting, and of each shape by number of requests. Every step tells of
the machine as it is now, so that shapes can be compared which were seen at different times; how well each is known
says which ones are worth trying.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from engine.levels import Levels, Names

Shape = tuple[int, int]
"""(chains, tokens in a chain)."""

PLAIN: Shape = (0, 0)
BESIDE: Shape = (0, 1)
"""Stands for whatever requests draft that the controller does not decide about."""
_DRAFTING = "drafting"
_OFF, _SHAPE_OFF = 0.12**2, 0.10**2
"""Variance (of logarithms) of what was measured at start: for plain steps, and for drafting as such; and how a shape
differs from that."""
_FORGETS_S = 600.0
_RETRY = 0.999
"""Share of what is known that each plain step leaves: slow drafting steps may have had another reason, and after long
enough drafting is tried again."""


class Corrections:
    """Measured over predicted seconds, by shape and about how many requests."""

    def __init__(self) -> None:
        self._levels = Levels(_FORGETS_S)
        self._was_plain = False
        self.learned_plain = 0
        """The step that told most recently what plain ones take."""

    def note(self, step: int, shape: Shape, num_rows: int, measured_s: float, predicted_s: float) -> None:
        """Step number `step` had so many requests and drafted this shape, or was plain."""
        was_plain, self._was_plain = self._was_plain, shape == PLAIN
        self._levels.pass_time(measured_s)
        if shape == PLAIN:
            self._levels.fade(_RETRY)
            if not was_plain:
                return  # it found other weights in the caches
            self.learned_plain = step
        names = _names(shape, num_rows)
        is_first = names[-1] not in self._levels
        for name in names:
            if name not in self._levels:
                self._levels.begin(name, _off(name))
        if shape == PLAIN or not is_first:  # it may have something to warm up
            self._levels.observe(names, measured_s / predicted_s)

    def factor(self, shape: Shape, num_rows: int) -> float:
        """What to multiply a prediction with."""
        return self._levels.times(_names(shape, num_rows))

    def doubt(self, shape: Shape, other: Shape, num_rows: int) -> float:
        """Standard deviation, of logarithms, of how the steps of two shapes compare."""
        names, others = _names(shape, num_rows), _names(other, num_rows)
        unknown = sum(_off(name) for name in {*names} ^ {*others} if name not in self._levels)
        return math.sqrt(max(0.0, self._levels.variance(names, others)) + unknown)


def _names(shape: Shape, num_rows: int) -> Names:
    own = (shape, _size(num_rows))
    return [own] if shape == PLAIN else [_DRAFTING, own]


def _off(name: Hashable) -> float:
    """Variance of what was measured at start of what a level stands for."""
    return _OFF if name == _DRAFTING or (isinstance(name, tuple) and name[0] == PLAIN) else _SHAPE_OFF


def _size(num_rows: int) -> int:
    """Numbers of requests that count as one: 1, 2, 3 to 5, 6 to 10, 11 to 21, ... with the powers of two inside."""
    return (num_rows * 3 // 2).bit_length()
