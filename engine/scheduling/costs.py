"""How long a step takes by its shape: measured points, piecewise linear between them, corrected by what is seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Many
from dataclasses import dataclass


class Curve:
    """A cost that grows with a size: never falls, goes on straight behind its last point."""

    def __init__(self, points: Many[tuple[float, float]]) -> None:
        """points: (size, seconds), any order; several of one size are averaged."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in points:
            by_size.setdefault(size, []).append(seconds)
        self.sizes = sorted(by_size)
        self.seconds: list[float] = []
        for size in self.sizes:
            mean = sum(by_size[size]) / len(by_size[size])
            self.seconds.append(max(mean, self.seconds[-1] if self.seconds else 0.0))

    def at(self, size: float) -> float:
        """Seconds for a size."""
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return float(self.seconds[0])
        upper = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        low, high = self.sizes[upper - 1], self.sizes[upper]
        share = (size - low) / (high - low)
        return float(self.seconds[upper - 1]) + share * (self.seconds[upper] - self.seconds[upper - 1])


@dataclass(frozen=True)
class StepCosts:
    """Parts of a step by size."""

    plain: Curve
    """A plain step, by requests."""
    nodes: Curve
    """What verifying drafted nodes adds (the target's pass, the rule, K/V moves), by all nodes of a step; from 0 on."""
    draft_pass: Curve
    """By rows of one pass of the draft model."""
    reading: Curve
    """What the draft model takes for tokens it has not seen, beside its first pass; from 0 on."""
    text_s: float = 0.0
    """What a token more of a request's text adds to a step."""
    context: float = 0.0
    """Tokens of the texts that the curves were measured behind."""

    @property
    def points(self) -> list[list[tuple[float, float]]]:
        """The curves' points and what texts add, as `of` reads them."""
        curves = (self.plain, self.nodes, self.draft_pass, self.reading)
        of_curves = (list(zip(curve.sizes, curve.seconds, strict=True)) for curve in curves)
        return [*of_curves, [(self.context, self.text_s)]]

    @staticmethod
    def of(points: Many[Many[tuple[float, float]]]) -> StepCosts:
        """Costs with the given points."""
        *curves, ((context, text_s),) = points
        plain, nodes, draft_pass, reading = map(Curve, curves)
        return StepCosts(plain, nodes, draft_pass, reading, text_s, context)

    def step_s(
        self, num_rows: int, num_drafting: int, nodes_by_depth: Many[int], num_text: float | None = None
    ) -> float:
        """A step of `num_rows` requests, `num_drafting` of which draft; how many nodes of each depth, from 1 on.

        num_text: tokens of all their texts; None where they are as long as those that were measured.
        """
        seconds = self.plain.at(num_rows) + self.nodes.at(sum(nodes_by_depth))
        if num_text is not None:
            # At least half of it: no line is followed down to nothing.
            seconds = max(seconds / 2, seconds + self.text_s * (num_text - num_rows * self.context))
        if num_drafting:
            # The first pass is over the last known tokens; nodes of the last depth see none.
            seconds += self.draft_pass.at(num_drafting) + sum(self.draft_pass.at(n) for n in nodes_by_depth[:-1])
        return seconds
