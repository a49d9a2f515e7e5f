"""How far times are from what was expected of them: a Kalman filter of logarithms.

What is observed is a sum of levels: one of the machine, which wanders, and others of what was done, which hardly
change. An observation tells the more of each, the less is known of it: where one is known, it tells of the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

_NOISE = 0.15**2
"""Variance of an observation. Steps vary by 10 to 15 %, each much like its neighbours, so that one alone tells less."""
_MACHINE, _WANDERS, _LONGEST_S = 0.1**2, 0.1**2 / 10, 60.0
"""Variance of what the machine is like at first, and what a second adds; more than a minute adds no more."""
_SHIFTS = 0.03**2 / 60
"""What a second adds to the variance of the other levels."""
_MOST = 64

Names = Sequence[Hashable]


class Levels:
    """Factors of times, as products of named ones; one that was never met is 1."""

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}
        """In the state, behind the machine's; the one that was met last at the end."""
        self._state = np.zeros(1)
        self._prior = np.array([_MACHINE])
        self._variance = np.diag(self._prior)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._places

    def begin(self, name: Hashable, variance: float, times: float = 1.0) -> None:
        """Follow a new name, with what is believed of it; of too many, the one met longest ago makes room."""
        if len(self._places) == _MOST:
            place = self._places.pop(next(iter(self._places)))
        else:
            place = len(self._state)
            self._state, self._prior = np.pad(self._state, (0, 1)), np.pad(self._prior, (0, 1))
            self._variance = np.pad(self._variance, (0, 1))
        self._places[name] = place
        self._state[place], self._prior[place] = math.log(times), variance
        self._variance[place] = self._variance[:, place] = 0.0
        self._variance[place, place] = variance

    def pass_time(self, seconds: float) -> None:
        """So much time lies between the last observation and the next."""
        seconds = min(_LONGEST_S, max(0.0, seconds))
        self._variance[np.diag_indices_from(self._variance)] += _SHIFTS * seconds
        self._variance[0, 0] += (_WANDERS - _SHIFTS) * seconds

    def fade(self, keep: float) -> None:
        """Of all levels but the machine's, which were begun as 1, only this share is still believed."""
        kept = np.full(len(self._state), keep)
        kept[0] = 1.0
        self._state *= kept
        self._variance *= np.outer(kept, kept)
        self._variance[np.diag_indices_from(self._variance)] += (1 - kept**2) * self._prior

    def observe(self, names: Names, times: float) -> None:
        """Something took so many times what was expected; every name has been begun."""
        for name in names:
            self._places[name] = self._places.pop(name)
        places = self._at(names)
        # One that has met another process is no rule.
        news = min(1.0, max(-0.5, times / self.times(names) - 1))
        covariance = self._variance[places].sum(0)
        gain = covariance / (covariance[places].sum() + _NOISE)
        self._state += gain * news
        self._variance -= np.outer(gain, covariance)

    def times(self, names: Names) -> float:
        """The factor of these together, on the machine as it is now."""
        return math.exp(self._state[self._at(names)].sum())

    def variance(self, names: Names, others: Names | None = None) -> float:
        """Of the logarithm of these together, and of others beside which they are seen, without the machine: how well
        they are known.
        """
        side = np.zeros(len(self._state))
        side[self._at(names)] += 1.0
        side[self._at(others or ())] -= 1.0
        side[0] = 0.0
        return float(side @ self._variance @ side)

    def _at(self, names: Names) -> npt.NDArray[np.intp]:
        return np.array([0, *(self._places[name] for name in names if name in self._places)])
