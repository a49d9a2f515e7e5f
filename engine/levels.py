"""How far times are from what was expected of them: a Kalman filter of logarithms.

What is observed is a sum of levels: one of the machine, which wanders, and others of what was done, which hardly
change. An observation tells the more of each, the less is known of it: where one is known, it tells of the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

_NOISE = 0.15**2
"""Variance of an observation. Steps vary by 10 to 15 %, each much like its neighbours, so that one alone tells less."""
_MACHINE, _WANDERS, _LONGEST_S = 0.1**2, 0.1**2 / 10, 60.0
"""Variance of what the machine is like at first, and what a second adds; more than a minute adds no more."""
_TURN_S = 0.2
"""Time is passed on in such pieces."""
_MOST = 64

Names = Sequence[Hashable]


class Levels:
    """Factors of times, as products of named ones; one that was never met is 1."""

    def __init__(self, forgets_s: float) -> None:
        """forgets_s: seconds in which about two thirds of what was seen of levels, but for the machine's, give way to
        what was believed of them at first.
        """
        self._forgets_s = forgets_s
        self._places: dict[Hashable, int] = {}
        """In the state, behind the machine's; the one that was met last at the end."""
        self._state, self._believed = np.zeros(1), np.zeros(1)
        self._prior = np.array([_MACHINE])
        self._variance = np.diag(self._prior)
        self._passed_s = 0.0

    def __contains__(self, name: Hashable) -> bool:
        return name in self._places

    def begin(self, name: Hashable, variance: float, times: float = 1.0) -> None:
        """Follow a new name, with what is believed of it; of too many, the one met longest ago makes room."""
        if len(self._places) == _MOST:
            place = self._places.pop(next(iter(self._places)))
        else:
            place = len(self._state)
            self._state, self._believed = np.pad(self._state, (0, 1)), np.pad(self._believed, (0, 1))
            self._prior, self._variance = np.pad(self._prior, (0, 1)), np.pad(self._variance, (0, 1))
        self._places[name] = place
        self._state[place] = self._believed[place] = math.log(times)
        self._variance[place] = self._variance[:, place] = 0.0
        self._variance[place, place] = self._prior[place] = variance

    def pass_time(self, seconds: float) -> None:
        """So much time lies between the last observation and the next."""
        self._passed_s += max(0.0, seconds)
        if self._passed_s >= _TURN_S:
            self.fade(math.exp(-self._passed_s / self._forgets_s))
            self._variance[0, 0] += _WANDERS * min(_LONGEST_S, self._passed_s)
            self._passed_s = 0.0

    def fade(self, keep: float) -> None:
        """Of all levels but the machine's only this share is still known, the rest is believed as at first."""
        kept = np.full(len(self._state), keep)
        kept[0] = 1.0
        self._state += (1 - kept) * (self._believed - self._state)
        self._variance *= np.outer(kept, kept)
        self._variance.flat[:: len(kept) + 1] += (1 - kept**2) * self._prior

    def observe(self, names: Names, times: float) -> None:
        """Something took so many times what was expected; every name has been begun."""
        for name in names:
            self._places[name] = self._places.pop(name)
        places = self._at(names)
        covariance = self._variance[places].sum(0)
        known = covariance[places].sum()
        gain = covariance / (known + _NOISE)
        # A slow one may have met another process: it changes no more than what is known leaves open; no one is fast so.
        most = min(1.0, (known + _NOISE) / math.sqrt(known))
        self._state += gain * min(most, max(-0.5, times / math.exp(self._state[places].sum()) - 1))
        self._variance -= np.outer(gain, covariance)

    def times(self, names: Names) -> float:
        """The factor of these together, on the machine as it is now."""
        return math.exp(sum(self._state[place] for place in self._at(names)))

    def variance(self, names: Names, others: Names | None = None) -> float:
        """Of the logarithm of `times`; or, how well is known how it compares with that of others."""
        signs = [(place, 1) for place in self._at(names)]
        if others is not None:
            signs += [(place, -1) for place in self._at(others)]
        return float(sum(sign * other * self._variance[one, two] for one, sign in signs for two, other in signs))

    def _at(self, names: Names) -> list[int]:
        return [0, *(self._places[name] for name in names if name in self._places)]
