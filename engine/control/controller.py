"""Choose one shape for all adaptive requests of a step, or plain decoding.

It is the choice with the most tokens per second.

The tokens of K chains of L tokens come from the acceptance so far (`acceptance.py`), and the time
of its steps is measured against plain steps under the same load (`step_time.py`). A choice holds
for a block of steps, across requests. A few blocks are trials: of plain steps while their time is
uncertain, because answers report a speedup over them, and of shapes that would be the best ones,
were they as good as their measurements allow.

Non-anticipating: a choice depends on sizes, times and tokens of the past, never on tokens that are
drafted or drawn next, so the output keeps the target's distribution. Not for requests that fix
their shape, or whose seed must give the same answer under any load (`Speculation.adaptive`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.control.acceptance import Acceptance
from engine.control.arms import COLD_STEPS, GUESS_VARIANCE, LEAST_BLOCK_STEPS, Bucket, block_steps
from engine.control.step_time import StepTimes
from engine.control.step_work import NO_DRAFTS, PLAIN, Shape
from engine.fanout import Fanout, chains
from engine.request import Request

_MENU = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 8), (2, 3), (4, 3), (4, 5))
_CLEAR_GAIN = 1.02
"""Ratio by which another shape must be better than the present one."""
_LEAST_GAIN = 1.03
"""Ratio by which drafts must be better than plain decoding."""
_LOSS_SHARE = 0.01
"""Share of a bucket's time that trials may lose in the long run."""
_EARLY_LOSS = 0.7
"""Early they may lose more: this number of steps, times the square root of the bucket's steps."""
_LEAST_LOSS = 0.1
"""Least share of a trial's time that counts as lost."""
_PLAIN_STD = 0.035
"""Plain steps are tried until their time is known to this accuracy."""
_SELDOM_S = 0.2
"""Most seconds between choices while plain decoding stays the best."""
_LONGEST_TRIAL = 4
"""Most steps of a trial over the steps that it should observe."""
_MOST_PROMPT = 4.0
"""If prompts take longer than this number of plain steps, the shape is that of other steps."""


class AdaptiveSequence(Protocol):
    """The part of a sequence on which choices depend (`engine.scheduling.sequence`)."""

    request: Request


@dataclass
class BucketChoice:
    """Choices for the steps of one bucket."""

    best: Shape | None = None
    """Best shape; the present block may be a trial of another one."""
    shape: Shape = PLAIN
    """Shape of the present block, and its steps that are left."""
    num_left: int = 0
    last_observed: float = math.inf
    """Observed steps of the bucket at which a trial ends."""
    num_steps: int = 0
    lost: float = 0.0
    """Time lost by trials, in steps of the best shape."""
    length: int = 0
    """Steps of the last block that was no trial."""


class Controller:
    """Chooses one shape for all adaptive requests."""

    def __init__(self, times: StepTimes, longest: int) -> None:
        """longest: most tokens of a chain."""
        self.times = times
        self.acceptance = Acceptance(longest)
        self.shape = PLAIN
        """Chosen for the planned step."""
        self.rests = False
        """Whether plain decoding is the best at the load of the planned step."""
        self.reads = True
        """Whether the draft model also reads the texts of requests that do not draft, to stay
        current: whether the best shape of steps without prompts drafts.
        """
        self._longest = longest
        self._turns: dict[int, BucketChoice] = {}
        """Choices by the identity of the bucket."""
        self._num_unapplied = 0
        """Steps since the acceptance was last updated."""

    def choose(
        self, adaptive: Sequence[AdaptiveSequence], others: Sequence[Fanout] = (), with_prompts: bool = False
    ) -> None:
        """Choose the drafts of the adaptive requests that emit in the next step.

        Called before each step. others: drafts of each of the other requests in the step.
        """
        self._num_unapplied += 1
        if not adaptive:
            return
        bucket = self.times.bucket(len(adaptive) + len(others), with_prompts)
        turn = self._turns.get(id(bucket))
        if turn is None:
            turn = self._turns[id(bucket)] = BucketChoice()
        turn.num_steps += 1
        if turn.num_left <= 0 or bucket.num_observed >= turn.last_observed:
            self._begin(turn, bucket, adaptive, others)
        turn.num_left -= 1
        self.shape = turn.shape
        self.rests = turn.best == PLAIN

    def _begin(
        self, turn: BucketChoice, bucket: Bucket, adaptive: Sequence[AdaptiveSequence], others: Sequence[Fanout]
    ) -> None:
        """Choose the shape of the next block of steps."""
        self.acceptance.apply(self._num_unapplied)
        self._num_unapplied = 0
        rows = len(adaptive) + len(others)
        known = bucket.usual if bucket.usual is not None and bucket.prompt > _MOST_PROMPT else bucket
        values = {shape: self._value(shape, known, len(adaptive), others) for shape in self._shapes(adaptive)}
        best = self._best(turn, values)
        plain_s = self._plain_s(known, rows)
        num_steps = block_steps(plain_s) + COLD_STEPS
        longer = min(2 * turn.length, int(_SELDOM_S / plain_s)) if best == PLAIN == turn.best else 0
        turn.best = turn.shape = best
        turn.num_left = turn.length = max(num_steps, longer)
        turn.last_observed = math.inf
        if bucket.usual is None:
            self.reads = best != PLAIN
        if known is not bucket or any(others):
            return
        trial = self._trial(best, bucket, values)
        cost = self.times.cost(bucket, chains(*trial), rows, rows)
        cost /= self.times.cost(bucket, chains(*best), rows, rows)
        lost = num_steps * cost * max(_LEAST_LOSS, 1.0 - values[trial] / values[best])
        most = _EARLY_LOSS * math.sqrt(turn.num_steps) + _LOSS_SHARE * turn.num_steps
        if trial != best and turn.lost + lost <= most:
            turn.shape = trial
            # Steps in which the draft model reads, or that begin an answer, say nothing.
            turn.num_left = _LONGEST_TRIAL * num_steps
            turn.last_observed = bucket.num_observed + num_steps
            turn.lost += lost

    def _best(self, turn: BucketChoice, values: dict[Shape, float]) -> Shape:
        """Return the best shape; another one must be clearly better than the present one."""
        best = max(values, key=values.__getitem__)
        if turn.best in values and values[best] < _CLEAR_GAIN * values[turn.best]:
            best = turn.best
        return best if values[best] >= _LEAST_GAIN * values[PLAIN] else PLAIN

    def _trial(self, best: Shape, bucket: Bucket, values: dict[Shape, float]) -> Shape:
        """Return the shape to try; the best one if there is no trial."""
        # A trial is compared with steps of the best shape.
        if bucket.current != chains(*best) or bucket.num_in_block < LEAST_BLOCK_STEPS:
            return best
        now_s = self.times.now_s
        variances = bucket.variances(chains(*best), now_s)
        plain_std = math.sqrt(variances[NO_DRAFTS])
        is_plain_uncertain = plain_std > _PLAIN_STD and bucket.usual is None
        if best != PLAIN and (is_plain_uncertain or not bucket.is_measured):
            return PLAIN
        hopes = {shape: value * math.exp(self._std(shape, variances)) for shape, value in values.items()}
        hopes[PLAIN] = values[PLAIN] * math.exp(plain_std)
        hopes[best] = values[best]
        return max(hopes, key=hopes.__getitem__)

    def _std(self, shape: Shape, variances: dict[Fanout, float]) -> float:
        """Return the standard deviation of the logarithm of a shape's tokens per second."""
        time_std = math.sqrt(variances.get(chains(*shape), GUESS_VARIANCE))
        return math.hypot(time_std, self.acceptance.log_std(shape[0]))

    def _value(self, shape: Shape, bucket: Bucket, num_adaptive: int, others: Sequence[Fanout]) -> float:
        """Return the tokens of a step over its time, in plain steps."""
        rows = num_adaptive + len(others)
        fanout = chains(*shape)
        tokens = num_adaptive * self._tokens(fanout) + sum(map(self._tokens, others))
        cost = self.times.cost(bucket, fanout, num_adaptive, rows)
        # Prompts take their time with any drafts; counted in, it would make every draft cheap.
        cost += bucket.prompt * max(0.0, cost - 1.0)
        if shape != PLAIN:
            # While a shape drafts, the draft model reads all texts.
            read_s = self.times.pace * self.times.prices.read_s * self.acceptance.prompt_share
            cost += tokens * read_s / self._plain_s(bucket, rows)
        return tokens / cost

    def _plain_s(self, bucket: Bucket, rows: int) -> float:
        """Return the present seconds of a plain step."""
        arm = bucket.arms.get(bucket.current)
        load = self.times.pace
        if arm is not None and arm.recent:
            load = arm.recent / max(1.0, arm.cost)
        return load * self.times.prices.plain_s(rows)

    def _shapes(self, adaptive: Sequence[AdaptiveSequence]) -> list[Shape]:
        """Return plain decoding and every shape within the limits of at least one request."""
        shapes = [PLAIN]
        speculations = [sequence.request.speculation for sequence in adaptive]
        for num_drafts, length in {(limits.num_drafts, limits.draft_length) for limits in speculations}:
            shapes += menu(num_drafts, length, self._longest)
        return shapes

    def fanout(self, sequence: AdaptiveSequence) -> Fanout:
        """Return a request's drafts in the planned step: the common choice within its limits."""
        num_drafts, length = self.shape
        if not length:
            return NO_DRAFTS
        limits = sequence.request.speculation
        num_drafts = min(num_drafts, limits.num_drafts)
        most_nodes = limits.num_drafts * limits.draft_length
        return chains(num_drafts, min(length, most_nodes // num_drafts))

    def _tokens(self, fanout: Fanout) -> float:
        """Return the expected tokens of a request in a step; chains of a tree count at its root."""
        return 1.0 + float(self.acceptance.reached(fanout[0])[: len(fanout)].sum()) if fanout else 1.0

    def observe(self, num_drafts: int, length: int, num_accepted: int) -> None:
        """Record the verification of a row's drafts. length: tokens of each chain."""
        self.acceptance.observe(num_drafts, min(num_accepted + 1, length), min(num_accepted, length))


def menu(num_drafts: int, draft_length: int, longest: int) -> list[Shape]:
    """Return the shapes within a request's limits of chains and nodes."""
    most_nodes = num_drafts * draft_length
    shapes = [
        (count, length)
        for count, length in _MENU
        if count <= num_drafts and length <= longest and count * length <= most_nodes
    ]
    largest = (num_drafts, draft_length)
    return shapes if largest in shapes else [*shapes, largest]
