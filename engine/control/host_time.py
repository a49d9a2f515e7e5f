"""Host time of a step outside its parts: planning it, and the messages between two steps.

A step whose requests draft takes longer here, too: its rows are larger, more tokens are committed,
more times are learned, and the processor's caches hold the draft model's weights. With a small
model this is a tenth of a plain step, so drafting steps and plain steps have different host times.

host = level * factor ^ (share of the requests that draft)

The state of a Kalman filter is the logarithms of level and factor. The level follows the load. The
factor stays what contrasts of plain and drafting steps have shown, so that it holds for loads at
which no plain step has been served.
"""

from __future__ import annotations

import math

import numpy as np

from engine.control.step_work import StepWork

_FACTOR = 1.5
"""Factor of drafting before a contrast has been seen; on one core of an EPYC it was 1.4 to 1.6."""
_FACTOR_STD = 0.3
"""Standard deviation of this factor's logarithm."""
_LEVEL_DRIFT = 0.01
"""Standard deviation that a step adds to the logarithm of the level."""
_STD = 0.15
"""Noise of a step."""
_PROMPT_STD = 1.0
"""Noise of a step that reads prompts, in which requests are admitted."""
_MOST = 2.0
"""Standard deviations by which a step may exceed the prediction; the excess had another cause."""


class HostTime:
    """Predicts the host time of steps, and learns from completed steps."""

    def __init__(self) -> None:
        self._state = np.array([-math.inf, math.log(_FACTOR)])
        self._variance = np.diag([0.0, _FACTOR_STD**2])

    def usual_s(self, work: StepWork) -> float:
        """Return the host seconds of such a step; 0 before the first observation."""
        return math.exp(float(self._state @ _slopes(work)))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record a step that followed another step at once, with warm caches."""
        # The controller's time, which is not part of it, is measured with another clock.
        if seconds <= 0:
            return
        slopes = _slopes(work)
        if math.isinf(self._state[0]):
            self._begin(seconds, float(slopes[1]))
            return
        std = _PROMPT_STD if work.prompt else _STD
        self._variance[0, 0] += _LEVEL_DRIFT**2
        covariance = self._variance @ slopes
        error_variance = float(slopes @ covariance) + std**2
        error = min(seconds / self.usual_s(work) - 1.0, _MOST * math.sqrt(error_variance))
        self._state += covariance * (error / error_variance)
        self._variance -= np.outer(covariance, covariance) / error_variance

    def _begin(self, seconds: float, share: float) -> None:
        """Set the level by the first observation. share: of the requests that drafted."""
        self._state[0] = math.log(seconds) - share * self._state[1]
        factor_variance = float(self._variance[1, 1])
        self._variance[0, 0] = _STD**2 + share**2 * factor_variance
        self._variance[0, 1] = -share * factor_variance
        self._variance[1, 0] = -share * factor_variance


def _slopes(work: StepWork) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([1.0, work.num_drafting / max(1, work.rows)])
