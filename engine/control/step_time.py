"""Measured times of steps, and of plain decoding in their place.

Steps of a similar number of requests share a bucket of arms (`arms.py`); steps that read prompts
have separate buckets. The time of plain decoding in the place of a step is the step's own time over
the cost of its arm, and unknown until plain steps have been measured in the bucket. Before any
comparison a cost is a guess from prices that are measured once at start.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from engine.control.arms import Bucket, StepArm
from engine.control.step_work import MIXED, NO_DRAFTS, StepWork
from engine.fanout import Fanout, level_widths

LOADS = (1, 4, 16, 64)
"""Most requests in the steps of each bucket but the last."""
_PLAIN_LASTS_S = 60.0
"""Seconds for which the time of plain steps stands for steps of no arm, as text drafts."""
_TEXT_SHARE = 1e-3
"""Guess of how much a prompt's token costs more for each token before it."""
_RATE = 1 / 32
"""Influence of a step on prices, means and the pace of the machine."""


class Prices(msgspec.Struct, frozen=True):
    """Seconds that are measured once at start (`start/measuring.py`)."""

    step_s: float
    """Plain step of one request, and further row of the target's pass."""
    row_s: float
    pass_s: float = 0.0
    """Pass of the draft model, and its further row."""
    draw_s: float = 0.0
    prompt_s: float = 0.0
    """Token of a prompt that the target reads, and that the draft model reads."""
    read_s: float = 0.0

    def plain_s(self, rows: int) -> float:
        """Return the seconds of a plain step."""
        return self.step_s + self.row_s * (rows - 1)

    def excess(self, rows: int, fanout: Fanout) -> float:
        """Return the extra time of a step whose requests draft, in plain steps."""
        widths = level_widths(fanout)
        num_drawn = rows * (1 + sum(widths[:-1])) - len(widths)
        passes_s = len(widths) * self.pass_s + num_drawn * self.draw_s
        return (passes_s + rows * sum(widths) * self.row_s) / self.plain_s(rows)


class PlainTimes(msgspec.Struct, frozen=True):
    """Times that plain decoding would have taken in place of a step; see `StepStats`."""

    plain_s: float | None = None
    usual_plain_s: float = 0.0
    prompt_s: float = 0.0


class StepTimes:
    """Measures steps, and returns what plain decoding would have taken in their place."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.now_s = 0.0
        """End of the last step."""
        self.pace = 1.0
        """Time of the recent steps over that at start, if they had been plain."""
        self.text_row = 1.0
        """Price of a text draft's row over that at start."""
        self._buckets: dict[tuple[int, bool], Bucket] = {}
        self._prompt_s = prices.prompt_s
        self._prompt_text_s = _TEXT_SHARE * prices.prompt_s
        self.drafting: Bucket | None = None
        """Bucket of the last step that drafted without prompts."""

    def bucket(self, rows: int, with_prompts: bool = False) -> Bucket:
        """Return the bucket of steps with this number of requests."""
        key = (bisect_left(LOADS, rows), with_prompts)
        bucket = self._buckets.get(key)
        if bucket is None:
            usual = self.bucket(rows) if with_prompts else None
            bucket = self._buckets[key] = Bucket(rows, usual=usual)
        return bucket

    def cost(self, bucket: Bucket, fanout: Fanout, num_drafting: int, rows: int) -> float:
        """Return the time of a step over that of a plain step.

        num_drafting: requests that draft; the measured cost is that of steps in which all do.
        """
        if not fanout:
            return 1.0
        arm = bucket.arms.get(fanout)
        share = num_drafting / rows
        if arm is not None and arm.is_compared:
            return 1.0 + share * (arm.cost - 1.0)
        if bucket.usual is not None:
            usual = self.cost(bucket.usual, fanout, num_drafting, rows)
            return 1.0 + (usual - 1.0) / (1.0 + bucket.prompt)
        return 1.0 + share * self._guess_factor(bucket) * self.prices.excess(rows, fanout)

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step without its prompts."""
        cost = self.cost(self.bucket(work.rows), work.drafts, work.rows, work.rows)
        return self.pace * cost * self.prices.plain_s(work.rows)

    def _guess_factor(self, bucket: Bucket) -> float:
        """Return how much more the measured arms cost than their guesses."""
        rows = round(bucket.rows)
        measured = [
            (arm.cost - 1.0, self.prices.excess(rows, fanout))
            for fanout, arm in bucket.arms.items()
            if arm.is_compared and fanout and fanout != MIXED
        ]
        if not measured:
            return 1.0
        costs, guesses = map(sum, zip(*measured, strict=True))
        return min(16.0, max(0.1, costs / guesses)) if guesses else 1.0

    def rest_s(self, work: StepWork) -> float:
        """Return the seconds of a step without drafts."""
        decoding_s = self.prices.plain_s(work.rows) if work.rows else 0.0
        return self.pace * decoding_s + self._prompts_s(work)

    def text_row_s(self) -> float:
        """Return the seconds of a further row of text drafts."""
        return self.pace * self.text_row * self.prices.row_s

    def _prompts_s(self, work: StepWork) -> float:
        return self.pace * (work.prompt * self._prompt_s + work.prompt_text * self._prompt_text_s)

    def observe(
        self, work: StepWork, wall_s: float, draft_s: float, now_s: float, between_s: float | None = 0.0
    ) -> PlainTimes:
        """Record a step; return what plain decoding would have taken in its place.

        between_s: part of its time before it began, for messages and planning; None for a step that
        did not follow another one, from which nothing is learned.
        """
        self.now_s = now_s
        if not work.rows:
            return PlainTimes(0.0, 0.0, wall_s - draft_s)
        bucket = self.bucket(work.rows)
        unit_s = self.prices.plain_s(work.rows)
        plain = self._plain_times(bucket, work, wall_s, draft_s, unit_s)
        # A plain step in which the draft model reads is not plain, and reading much is no draft.
        reads_much = work.read > (work.nodes > 0) * 2 * work.rows and not work.prompt
        if reads_much or between_s is None:
            return plain
        if work.prompt:
            self._learn_prompts(work, plain.prompt_s)
            bucket = self.bucket(work.rows, with_prompts=True)
            prompts_s = self._prompts_s(work)
            bucket.prompt += _RATE * (prompts_s / unit_s - bucket.prompt)
            unit_s += prompts_s
        else:
            self.drafting = bucket if work.drafts else self.drafting
            self._learn_pace(bucket, work, wall_s / unit_s)
            rate = _RATE if bucket.between_s else 1.0
            bucket.between_s += rate * (between_s - bucket.between_s)
        bucket.rows += _RATE * (work.rows - bucket.rows)
        bucket.text += _RATE * (work.text / work.rows - bucket.text)
        arm = bucket.arms.get(work.drafts)
        if arm is None:
            arm = bucket.add(work.drafts)
        if not arm.is_compared:
            arm.cost = self.cost(bucket, work.drafts, work.rows, work.rows)
        bucket.observe(work.drafts, wall_s / unit_s, (wall_s - draft_s) / unit_s, wall_s, now_s)
        return plain

    def _plain_times(self, bucket: Bucket, work: StepWork, wall_s: float, draft_s: float, unit_s: float) -> PlainTimes:
        arm = bucket.arms.get(work.drafts)
        prompt_s = self._prompt_part_s(arm, work, wall_s - draft_s, unit_s) if work.prompt else 0.0
        left_s = wall_s - prompt_s
        if not work.drafts:
            left_s -= draft_s if work.read else 0.0
            return PlainTimes(left_s, left_s, prompt_s)
        if arm is not None and arm.is_compared and bucket.is_measured:
            cost = max(1.0, arm.cost)
            usual_s = arm.recent * unit_s / cost
            # The draft model's reading of a prompt is no part of a usual step.
            return PlainTimes(min(usual_s, left_s) if work.prompt else left_s / cost, usual_s, prompt_s)
        plain = bucket.plain
        if plain.recent and self.now_s - plain.ended_s < _PLAIN_LASTS_S:
            return PlainTimes(min(plain.recent * unit_s, left_s), plain.recent * unit_s, prompt_s)
        return PlainTimes(prompt_s=prompt_s)

    def _prompt_part_s(self, arm: StepArm | None, work: StepWork, rest_s: float, unit_s: float) -> float:
        """Return the part of a step's time that its prompts took.

        With drafts, it is at most what they take without.
        """
        usual_s = self._prompts_s(work)
        prompt_s = usual_s
        if arm is not None and arm.recent_rest:
            prompt_s = rest_s - arm.recent_rest * unit_s
        return min(max(0.0, prompt_s), rest_s, usual_s if work.nodes else rest_s)

    def _learn_prompts(self, work: StepWork, prompt_s: float) -> None:
        """Correct the prices of a prompt's token by a plain step."""
        usual_s = self._prompts_s(work)
        if work.nodes or prompt_s <= 0 or usual_s <= 0:
            return
        rate = min(0.5, 8 * _RATE * work.prompt / 64)
        factor = min(2.0, max(0.5, prompt_s / usual_s)) ** rate
        text_share = self.pace * work.prompt_text * self._prompt_text_s / usual_s
        self._prompt_text_s *= factor**text_share
        self._prompt_s *= factor ** (1 - text_share)

    def _learn_pace(self, bucket: Bucket, work: StepWork, load: float) -> None:
        if work.drafts != MIXED:
            cost = self.cost(bucket, work.drafts, work.rows, work.rows)
            self.pace += _RATE * (min(load / cost, 4 * self.pace) - self.pace)
            return
        plain = bucket.plain
        guess = work.nodes * self.text_row_s() / self.prices.plain_s(work.rows)
        if plain.recent and guess:
            factor = max(0.25, min(4.0, (load - plain.recent) / guess))
            self.text_row = max(0.1, min(10.0, self.text_row * factor ** (_RATE / 2)))

    def observe_idle(self, bucket: Bucket, step_s: float, now_s: float) -> None:
        """Record a plain step of an idle engine, which had the bucket's mean number of requests.

        step_s: its seconds without messages; messages take what they take between other steps.
        """
        seconds = step_s + bucket.between_s
        load = seconds / self.prices.plain_s(round(bucket.rows))
        bucket.observe(NO_DRAFTS, load, load, seconds, now_s)
