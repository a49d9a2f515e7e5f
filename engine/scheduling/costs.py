"""How long a step takes by its shape: measured points, piecewise linear between them, corrected by what is seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Many
from dataclasses import dataclass

from engine.metrics import PlainTimes


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

    plain: PlainTimes
    """A plain step, by requests and the length of their texts."""
    nodes: Curve
    """What verifying drafted nodes adds (the target's pass, the rule, K/V moves), by all nodes of a step; from 0 on."""
    draft_pass: Curve
    """By rows of one pass of the draft model."""
    reading: Curve
    """What the draft model takes for tokens it has not seen, beside its first pass; from 0 on."""

    @property
    def points(self) -> list[list[tuple[float, float]]]:
        """The curves' points, as `of` reads them."""
        curves = (self.nodes, self.draft_pass, self.reading)
        return [list(zip(curve.sizes, curve.seconds, strict=True)) for curve in curves]

    @staticmethod
    def of(points: Many[Many[tuple[float, float]]], plain: PlainTimes) -> StepCosts:
        """Costs with the given points."""
        nodes, draft_pass, reading = map(Curve, points)
        return StepCosts(plain, nodes, draft_pass, reading)

    def step_s(self, num_rows: int, num_drafting: int, nodes_by_depth: Many[int], num_text: int = 0) -> float:
        """A step of `num_rows` requests, `num_drafting` of which draft.

        nodes_by_depth: how many nodes of each depth, from 1 on.
        num_text: tokens of all requests' texts. What longer texts add to the passes of drafts is not known.
        """
        seconds = self.plain.measured_s(num_rows, num_text / max(1, num_rows)) + self.nodes.at(sum(nodes_by_depth))
        if num_drafting:
            # The first pass is over the last known tokens; nodes of the last depth see none.
            seconds += self.draft_pass.at(num_drafting) + sum(self.draft_pass.at(n) for n in nodes_by_depth[:-1])
        return seconds
