"""How long a step takes by its shape: measured points, piecewise linear between them, corrected by what is seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from engine.metrics import PlainTimes

Points = list[tuple[float, float]]
"""(size, seconds)."""


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

    @property
    def points(self) -> Points:
        """(size, seconds), ascending."""
        return list(zip(self.sizes, self.seconds, strict=True))

    def at(self, size: float) -> float:
        """Seconds for a size."""
        if len(self.sizes) == 1 or size <= self.sizes[0]:
            return float(self.seconds[0])
        upper = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        low, high = self.sizes[upper - 1], self.sizes[upper]
        share = (size - low) / (high - low)
        return float(self.seconds[upper - 1]) + share * (self.seconds[upper] - self.seconds[upper - 1])


class NodeCosts:
    """What nodes add to a step, by how many requests it has: where rows are few, further ones cost little."""

    def __init__(self, of_rows: Mapping[int, Curve]) -> None:
        """of_rows: requests of a step -> seconds by nodes of all of them together."""
        self.num_rows = sorted(of_rows)
        self.of_rows = {num_rows: of_rows[num_rows] for num_rows in self.num_rows}

    def at(self, num_rows: int, num_nodes: int) -> float:
        """Seconds; in proportion between measured numbers of requests, outside of them as at the edge."""
        upper = bisect_left(self.num_rows, num_rows)
        low, high = self.num_rows[max(0, upper - 1)], self.num_rows[min(upper, len(self.num_rows) - 1)]
        low_s = self.of_rows[low].at(num_nodes)
        share = (num_rows - low) / (high - low) if low < high else 0.0
        return low_s + share * (self.of_rows[high].at(num_nodes) - low_s) if share else low_s


@dataclass(frozen=True)
class StepCosts:
    """Parts of a step by size."""

    plain: PlainTimes
    """A plain step, by requests and the length of their texts."""
    nodes: NodeCosts
    """What verifying drafted nodes adds: the target's pass, the rule, K/V moves."""
    draft_pass: Curve
    """By rows of one pass of the draft model."""
    reading: Curve
    """What the draft model takes for tokens it has not seen, beside its first pass; from 0 on."""

    @property
    def points(self) -> list[Any]:
        """The curves' points, as `of` reads them."""
        nodes = [[num_rows, curve.points] for num_rows, curve in self.nodes.of_rows.items()]
        return [nodes, self.draft_pass.points, self.reading.points]

    @staticmethod
    def of(points: Many[Any], plain: PlainTimes) -> StepCosts:
        """Costs with the given points."""
        nodes, draft_pass, reading = points
        of_rows = {int(num_rows): Curve(of_nodes) for num_rows, of_nodes in nodes}
        return StepCosts(plain, NodeCosts(of_rows), Curve(draft_pass), Curve(reading))

    def step_s(self, num_rows: int, num_drafting: int, nodes_by_depth: Many[int], num_text: int = 0) -> float:
        """A step of `num_rows` requests, `num_drafting` of which draft.

        nodes_by_depth: how many nodes of each depth, from 1 on.
        num_text: tokens of all requests' texts. What longer texts add to the passes of drafts is not known.
        """
        seconds = self.plain.measured_s(num_rows, num_text / max(1, num_rows))
        seconds += self.nodes.at(num_rows, sum(nodes_by_depth))
        if num_drafting:
            # The first pass is over the last known tokens; nodes of the last depth see none.
            seconds += self.draft_pass.at(num_drafting) + sum(self.draft_pass.at(n) for n in nodes_by_depth[:-1])
        return seconds
