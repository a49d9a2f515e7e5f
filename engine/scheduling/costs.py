"""How long a step takes by its shape: measured points, piecewise linear between them, corrected by what is seen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import astuple, dataclass
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
class TextCosts:
    """What longer texts add to steps with drafts, beside what they add to plain ones: in proportion to their tokens."""

    behind: int = 0
    """Tokens of a text, behind which nodes and passes were measured."""
    node_s: float = 0.0
    """Seconds that a token more of the text adds for a node."""
    pass_s: float = 0.0
    """The same for a pass of the draft model, by request: its chains read the text together."""
    window: int = 0
    """Tokens of a text that the draft model sees; 0 for all."""

    def of_nodes(self, num_nodes: int, length: float) -> float:
        """Seconds that nodes take more (or less) behind texts of this length."""
        return self.node_s * num_nodes * (length - self.behind)

    def of_passes(self, num_drafting: int, num_passes: int, length: float) -> float:
        """The same for passes over so many requests."""
        seen, behind = (min(one, self.window or one) for one in (length, self.behind))
        return self.pass_s * num_drafting * num_passes * (seen - behind)


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
    text: TextCosts = TextCosts()

    @property
    def points(self) -> list[Any]:
        """The curves' points, as `of` reads them."""
        nodes = [[num_rows, curve.points] for num_rows, curve in self.nodes.of_rows.items()]
        return [nodes, self.draft_pass.points, self.reading.points, list(astuple(self.text))]

    @staticmethod
    def of(points: Many[Any], plain: PlainTimes) -> StepCosts:
        """Costs with the given points."""
        nodes, draft_pass, reading, text = points
        of_rows = {int(num_rows): Curve(of_nodes) for num_rows, of_nodes in nodes}
        behind, node_s, pass_s, window = text
        costs = TextCosts(int(behind), float(node_s), float(pass_s), int(window))
        return StepCosts(plain, NodeCosts(of_rows), Curve(draft_pass), Curve(reading), costs)

    def step_s(self, num_rows: int, num_drafting: int, nodes_by_depth: Many[int], num_text: int = 0) -> float:
        """A step of `num_rows` requests, `num_drafting` of which draft.

        nodes_by_depth: how many nodes of each depth, from 1 on.
        num_text: tokens of all requests' texts.
        """
        plain_s = self.plain.measured_s(num_rows, num_text / max(1, num_rows))
        return plain_s + self.drafts_s(num_rows, num_drafting, nodes_by_depth, num_text)

    def drafts_s(self, num_rows: int, num_drafting: int, nodes_by_depth: Many[int], num_text: int = 0) -> float:
        """How much of a step (`step_s`) drawing the drafts and verifying them takes."""
        length, num_nodes = num_text / max(1, num_rows), sum(nodes_by_depth)
        seconds = max(0.0, self.nodes.at(num_rows, num_nodes) + self.text.of_nodes(num_nodes, length))
        if num_drafting:
            # The first pass is over the last known tokens; nodes of the last depth see none.
            passes = (num_drafting, *nodes_by_depth[:-1])
            drafting_s = sum(map(self.draft_pass.at, passes))
            seconds += max(0.0, drafting_s + self.text.of_passes(num_drafting, len(passes), length))
        return seconds
