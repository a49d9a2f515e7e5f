"""Arms: steps under a similar load that draft the same, and how long they take next to each other.

When another arm takes over in a bucket, its steps are compared with the last steps of the arm
before. So the *cost* of an arm, its steps' time over that of plain steps, does not depend on the
speed of the machine, which may change at any time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.control.step_work import NO_DRAFTS
from engine.fanout import Fanout

Numbers = npt.NDArray[np.float64]

COLD_STEPS = 4
"""Steps after which an arm has taken over. Caches hold its weights then, and the ends of answers,
which draft less, are shorter.
"""
LEAST_BLOCK_STEPS, MOST_BLOCK_STEPS = 8, 32
"""Fewest and most steps of an arm in a comparison."""
_BLOCK_S = 0.03
"""Seconds of such a block within these limits."""
_RECENT_STEPS = 24
"""Steps after which about a third of a step's influence on the recent time remains."""
_LONGEST_STEP = 3.0
"""Ratio to the recent time at which a step is cut, because it had another cause."""
GUESS_VARIANCE = 0.25**2
"""Variance of the logarithm of a guessed cost."""
_DRIFT = 2e-5
"""Growth of this variance in a second."""
_NOISE = (0.04**2, 0.1**2, 0.4**2)
"""Least, first and largest variance of a comparison."""
_CHANGE = 3.0
"""Standard deviations by which a comparison differs if something has changed."""
_NOISE_RATE = 1 / 16
"""Influence of a comparison on the known variance of comparisons."""
LONGEST_GAP_S = 30.0
"""Steps are not compared with steps that ended this long before."""


@dataclass
class StepArm:
    """Steps of a bucket that draft the same. Times are in guessed plain steps."""

    cost: float
    """Time of its steps over that of plain steps."""
    is_compared: bool = False
    recent: float = 0.0
    """Time of its recent steps, and without drafting."""
    recent_rest: float = 0.0
    ended_s: float = -math.inf


@dataclass
class Bucket:
    """Arms of the steps with a similar number of requests."""

    rows: float
    """Mean number of requests, tokens of a text, and time of a step's prompts."""
    text: float = 1.0
    prompt: float = 0.0
    between_s: float = 0.0
    """Mean seconds of messages and planning between two steps."""
    usual: Bucket | None = None
    """Bucket of the same number of requests without prompts, of a bucket with prompts."""
    arms: dict[Fanout, StepArm] = field(default_factory=lambda: {NO_DRAFTS: StepArm(1.0)})
    current: Fanout = NO_DRAFTS
    """Arm of the present steps."""
    num_observed: int = 0
    """Steps from which something was learned."""
    num_in_block: int = 0
    """Steps of the present arm since it has taken over."""
    num_compared: int = 0
    """Steps of the present arm that a comparison waits for."""
    idle_s: float = -math.inf
    """Time of the last block of plain steps of an idle engine (`step/idle.py`)."""
    noise: float = _NOISE[1]
    """Variance of the logarithm of a comparison."""
    _next: Fanout = NO_DRAFTS
    _num_next: int = 0
    _before: Fanout | None = None
    """Arm that the present one is compared with."""
    _sum: float = 0.0
    _doubted: list[Fanout] = field(default_factory=list)
    """Drafts of the last comparison, if it had a surprising result."""
    _is_doubtful: bool = False
    """Whether the present block has been compared with a surprising result."""
    _covariance_AA: Numbers = field(default_factory=lambda: np.zeros((1, 1)))
    """Covariance of the costs' logarithms at the last comparison, in the order of the arms. Plain
    steps have none, because their cost is the unit.
    """
    _compared_s: float = 0.0

    @property
    def plain(self) -> StepArm:
        """Return the plain steps."""
        return self.arms[NO_DRAFTS]

    @property
    def is_measured(self) -> bool:
        """Whether drafts have been compared with plain steps."""
        return self.plain.is_compared

    def add(self, drafts: Fanout) -> StepArm:
        """Add an arm whose cost will be guessed."""
        arm = self.arms[drafts] = StepArm(1.0)
        self._covariance_AA = np.pad(self._covariance_AA, (0, 1))
        self._covariance_AA[-1, -1] = GUESS_VARIANCE
        return arm

    def variances(self, base: Fanout, now_s: float) -> dict[Fanout, float]:
        """Return the variances of the logarithms of the costs over that of one arm."""
        covariance_AA = self._covariance_at(now_s)
        variance_A = np.diag(covariance_AA)
        number = list(self.arms).index(base)
        relative_A = variance_A + variance_A[number] - 2 * covariance_AA[number]
        return dict(zip(self.arms, np.maximum(relative_A, 0.0).tolist(), strict=True))

    def _difference(self, drafts: Fanout, other: Fanout) -> Numbers:
        """Return [A] the factors of the costs' logarithms in that of a ratio."""
        return np.array([(one == drafts) - (one == other) for one in self.arms], float)

    def _covariance_at(self, now_s: float) -> Numbers:
        """Return the present covariance; costs drift, but a guess is the least that is known."""
        # Steps of an idle engine may have been compared after the last step of requests.
        growth = _DRIFT * max(0.0, now_s - self._compared_s)
        grown_AA = self._covariance_AA + np.diag([0.0] + [growth] * (len(self.arms) - 1))
        factor_A = np.sqrt(np.minimum(1.0, GUESS_VARIANCE / np.maximum(np.diag(grown_AA), 1e-9)))
        present_AA: Numbers = grown_AA * np.outer(factor_A, factor_A)
        return present_AA

    def observe(self, drafts: Fanout, load: float, rest: float, step_s: float, now_s: float) -> None:
        """Record a step. load, rest: its time, and without drafting, in guessed plain steps."""
        self.num_observed += 1
        if drafts != self.current:
            self._num_next = self._num_next + 1 if drafts == self._next else 1
            self._next = drafts
            if self._num_next <= COLD_STEPS:
                return
            self._begin(drafts, step_s, now_s)
        self._num_next = 0
        arm = self.arms[drafts]
        self.num_in_block += 1
        if self.num_in_block > 1:
            load = min(load, _LONGEST_STEP * arm.recent)
        rate = max(1 / self.num_in_block, 1 / _RECENT_STEPS)
        arm.recent += rate * (load - arm.recent)
        arm.recent_rest += rate * (min(rest, load) - arm.recent_rest)
        arm.ended_s = now_s
        self._sum += load
        if self.num_in_block == self.num_compared:
            self._compare(now_s)

    def _begin(self, drafts: Fanout, step_s: float, now_s: float) -> None:
        """Let another arm take over."""
        if LEAST_BLOCK_STEPS <= self.num_in_block < self.num_compared:
            self._compare(now_s)
        if self.num_in_block >= LEAST_BLOCK_STEPS:
            self._before = self.current
        before = self._before
        has_ended = before is not None and now_s - self.arms[before].ended_s > LONGEST_GAP_S
        # A block with a surprising result is not compared twice.
        if before == drafts or has_ended or self._is_doubtful:
            self._before = None
        self._is_doubtful = False
        self.current = drafts
        self.num_in_block = 0
        self.num_compared = block_steps(step_s)
        self._sum = 0.0

    def _compare(self, now_s: float) -> None:
        """Correct the costs by the ratio of this block to the steps of the arm before it.

        This is a step of a Kalman filter of the costs' logarithms.
        """
        if self._before is None:
            return
        arm, before = self.arms[self.current], self.arms[self._before]
        error = math.log(self._sum / self.num_in_block / before.recent * before.cost / arm.cost)
        covariance_AA = self._covariance_at(now_s)
        difference_A = self._difference(self.current, self._before)
        known = float(difference_A @ covariance_AA @ difference_A)
        largest = _CHANGE * math.sqrt(known + self.noise)
        drafting = [one for one in (self.current, self._before) if one]
        # Before plain steps are compared, costs are known over each other alone.
        guesses = [one for one in drafting if not (self.arms[one].is_compared and self.is_measured)]
        is_surprising = abs(error) > largest
        self._is_doubtful = is_surprising and not guesses and drafting != self._doubted
        self._doubted = drafting if self._is_doubtful else []
        if self._is_doubtful:
            # Another process may have taken the core for a block. The next comparison decides.
            error = math.copysign(largest, error)
        elif is_surprising:
            covariance_AA = self._with_doubt(covariance_AA, guesses or drafting, error**2 / known)
            known = float(difference_A @ covariance_AA @ difference_A)
        influence_A = covariance_AA @ difference_A
        total = known + self.noise
        if arm.is_compared and before.is_compared:
            noise = min(error**2, _CHANGE**2 * total) - known
            self.noise += _NOISE_RATE * (noise - self.noise)
            self.noise = min(max(self.noise, _NOISE[0]), _NOISE[2])
        for known_arm, influence in zip(self.arms.values(), influence_A, strict=True):
            known_arm.cost *= math.exp(float(influence) * error / total)
        covariance_AA = covariance_AA - np.outer(influence_A, influence_A) / total
        self._covariance_AA = self._with_doubt(covariance_AA, self._doubted, self.noise / known)
        self._compared_s = now_s
        arm.is_compared = before.is_compared = True

    def _with_doubt(self, covariance_AA: Numbers, doubted: list[Fanout], ratio: float) -> Numbers:
        """Multiply the variances of doubted arms by a ratio above 1."""
        factor_A = np.where([one in doubted for one in self.arms], math.sqrt(max(1.0, ratio)), 1.0)
        present_AA: Numbers = covariance_AA * np.outer(factor_A, factor_A)
        return present_AA


def block_steps(step_s: float) -> int:
    """Return the number of steps of a block whose steps take this long."""
    return max(LEAST_BLOCK_STEPS, min(MOST_BLOCK_STEPS, math.ceil(_BLOCK_S / step_s)))
