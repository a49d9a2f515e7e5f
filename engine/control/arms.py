"""Arms: steps under a similar load that draft the same, and how long they take next to each other.

When another arm takes over in a bucket, its steps are compared with the last steps of the arm
before. So the *cost* of an arm, its steps' time over that of plain steps, does not depend on the
speed of the machine, which may change at any time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.control.step_work import NO_DRAFTS
from engine.fanout import Fanout

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
_LONGEST_STEP = 5.0
"""Ratio to the recent time at which a step is cut, because it had another cause."""
_HALF_LIFE_S = 90.0
"""Seconds after which a comparison has half of its weight."""
_LEAST_RATE = 1 / 8
"""Least influence of a new comparison on a cost."""
GUESS_STD, _PAIR_STD = 0.25, 0.08
"""Standard deviations of the logarithm of a guessed cost, and of a comparison."""
_CHANGE = 0.35
"""Logarithm of the ratio by which a comparison differs if something has changed."""
LONGEST_GAP_S = 30.0
"""Steps are not compared with steps that ended this long before."""


@dataclass
class StepArm:
    """Steps of a bucket that draft the same. Times are in guessed plain steps."""

    cost: float
    """Time of its steps over that of plain steps."""
    weight: float = 0.0
    """Faded number of comparisons; of plain steps, with any arm."""
    compared_s: float = 0.0
    recent: float = 0.0
    """Time of its recent steps, and without drafting."""
    recent_rest: float = 0.0
    ended_s: float = -math.inf

    def weight_at(self, now_s: float) -> float:
        """Return the present weight of its comparisons."""
        return self.weight * math.pow(0.5, (now_s - self.compared_s) / _HALF_LIFE_S)

    def std_at(self, now_s: float) -> float:
        """Return the standard deviation of the logarithm of its cost."""
        return _PAIR_STD / math.sqrt(self.weight_at(now_s) + (_PAIR_STD / GUESS_STD) ** 2)

    def count(self, error: float, now_s: float) -> float:
        """Count a comparison and return its influence. error: its cost over the known one."""
        earlier = self.weight_at(now_s)
        if abs(math.log(error)) > _CHANGE:
            earlier = min(earlier, 1.0)
        self.weight = earlier + 1.0
        self.compared_s = now_s
        return max(1 / self.weight, _LEAST_RATE)


@dataclass
class Bucket:
    """Arms of the steps with a similar number of requests."""

    rows: float
    """Mean number of requests, tokens of a text, and time of a step's prompts."""
    text: float = 1.0
    prompt: float = 0.0
    usual: Bucket | None = None
    """Bucket of the same number of requests without prompts, of a bucket with prompts."""
    arms: dict[Fanout, StepArm] = field(default_factory=lambda: {NO_DRAFTS: StepArm(1.0)})
    current: Fanout = NO_DRAFTS
    """StepArm of the present steps."""
    num_in_block: int = 0
    """Steps of the present arm since it has taken over."""
    num_compared: int = 0
    """Steps of the present arm that a comparison waits for."""
    idle_s: float = -math.inf
    """Time of the last block of plain steps of an idle engine (`step/idle.py`)."""
    _next: Fanout = NO_DRAFTS
    _num_next: int = 0
    _before: StepArm | None = None
    """StepArm that the present one is compared with."""
    _sum: float = 0.0

    @property
    def plain(self) -> StepArm:
        """Return the plain steps."""
        return self.arms[NO_DRAFTS]

    @property
    def is_measured(self) -> bool:
        """Whether drafts have been compared with plain steps."""
        return self.plain.weight > 0

    def observe(self, drafts: Fanout, load: float, rest: float, step_s: float, now_s: float) -> None:
        """Record a step. load, rest: its time, and without drafting, in guessed plain steps."""
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
            self._before = self.arms[self.current]
        before = self._before
        if before is self.arms[drafts] or (before and now_s - before.ended_s > LONGEST_GAP_S):
            self._before = None
        self.current = drafts
        self.num_in_block = 0
        self.num_compared = block_steps(step_s)
        self._sum = 0.0

    def _compare(self, now_s: float) -> None:
        """Correct the costs by the ratio of this block to the steps of the arm before it."""
        arm, before = self.arms[self.current], self._before
        if before is None:
            return
        ratio = self._sum / self.num_in_block / before.recent
        plain = self.plain
        drafting, cost = (before, 1 / ratio) if arm is plain else (arm, ratio * before.cost)
        error = cost / drafting.cost
        rate = drafting.count(error, now_s)
        is_first = False
        if plain in (arm, before):
            is_first = not plain.weight
            rate = plain.count(error, now_s)
        for other in self.arms.values():
            # What was measured next to a guess is as wrong as the guess.
            if other is drafting or (is_first and other.weight and other is not plain):
                other.cost *= error**rate


def block_steps(step_s: float) -> int:
    """Return the number of steps of a block whose steps take this long."""
    return max(LEAST_BLOCK_STEPS, min(MOST_BLOCK_STEPS, math.ceil(_BLOCK_S / step_s)))
