"""Text drafts of a request as one tree: the most probable continuations of its text.

A node's children are the next tokens of the candidates that agree so far. Together they are as probable as the most
trusted of these candidates, and share this by the odds of theirs. An estimate decides which drafts are worth their
time, and never how they are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from engine.request import TextDraft
from engine.scheduling.text_drafters.candidate import LONGEST_MATCH, Candidate

Estimate = Callable[[str, int], float]
"""Probability that a continuation is right: by drafter, and number of agreeing tokens before it."""
Kind = tuple[str, int]
"""Arguments of an `Estimate`."""


class TextTree:
    """Nodes in order of their probability, the most probable first; a parent comes before its children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        """Number of each node's parent; -1 is the end of the text."""
        self.depths: list[int] = []
        """Depth of each node, from 0 on."""
        self.probabilities: list[float] = []
        """Estimated probability that the text goes on with each node's path."""
        self._sources: list[str] = []
        self._kinds: dict[int, Kind] = {}
        """Most trusted kind of candidate below each node of which all children are known."""
        self._first_tokens: frozenset[int] = frozenset()
        """Next tokens of all candidates, also of those that are too improbable for the tree."""

    def __len__(self) -> int:
        return len(self.tokens)

    def chains(self, numbers: Sequence[int]) -> tuple[TextDraft, ...]:
        """Return the chains that together have these nodes; with a node come all above it."""
        inner = {self.parents[number] for number in numbers}
        return tuple(
            [TextDraft(self._sources[number], self._path(number)) for number in numbers if number not in inner]
        )

    def _path(self, number: int) -> tuple[int, ...]:
        tokens = []
        while number >= 0:
            tokens.append(self.tokens[number])
            number = self.parents[number]
        return tuple(tokens[::-1])

    def outcomes(self, emitted: Sequence[int]) -> list[tuple[Kind, bool]]:
        """Return what the tokens after the text show: for each node that they passed and that has children, the kind of
        these, and whether the next token was one of them.
        """
        children = dict(zip(zip(self.parents, self.tokens, strict=True), range(len(self)), strict=True))
        found = []
        node: int | None = -1
        for token in emitted:
            if node is None or node not in self._kinds:
                break
            kind, child = self._kinds[node], children.get((node, token))
            found.append((kind, token in self._first_tokens if node < 0 else child is not None))
            node = child
        return found


class _Child(NamedTuple):
    """Child that is not a node yet; sorted by its probability, the most probable first."""

    negative_probability: float
    order: int
    parent: int
    token: int
    agreeing: list[Candidate]


class _Growth:
    """A tree that grows by its most probable child."""

    def __init__(self, estimate: Estimate, least: float) -> None:
        self.tree = TextTree()
        self.waiting: list[_Child] = []
        self._estimate, self._least = estimate, least
        self._numbers = count()

    def offer(self, parent: int, depth: int, probability: float, agreeing: Sequence[Candidate]) -> None:
        """Let the next tokens of these candidates wait, which agree with the path to the parent.

        depth: of the children; probability: of the path to the parent.
        """
        odds: dict[int, float] = {}
        by_token: dict[int, list[Candidate]] = {}
        best, kind = 0.0, None
        for one in agreeing:
            token = one.token(depth)
            if token is None:
                continue
            evidence = min(one.evidence + depth, LONGEST_MATCH)
            right = self._estimate(one.source, evidence)
            odds[token] = odds.get(token, 0.0) + right / (1.0 - right)
            by_token.setdefault(token, []).append(one)
            if right > best:
                best, kind = right, (one.source, evidence)
        if kind is None:
            return
        if parent < 0:
            self.tree._first_tokens = frozenset(odds)
        total = sum(odds.values())
        shares = {token: probability * best * odd / total for token, odd in odds.items()}
        if parent < 0 or min(shares.values()) >= self._least:
            self.tree._kinds[parent] = kind
        for token, share in shares.items():
            if share >= self._least:
                heappush(self.waiting, _Child(-share, next(self._numbers), parent, token, by_token[token]))

    def add(self, deepest: int) -> None:
        """Make the most probable child a node."""
        child = heappop(self.waiting)
        tree, number = self.tree, len(self.tree)
        depth = tree.depths[child.parent] + 1 if child.parent >= 0 else 0
        tree.tokens.append(child.token)
        tree.parents.append(child.parent)
        tree.depths.append(depth)
        tree.probabilities.append(-child.negative_probability)
        tree._sources.append(max(child.agreeing, key=attrgetter("evidence")).source)
        if depth + 1 < deepest:
            self.offer(number, depth + 1, -child.negative_probability, child.agreeing)

    def finished(self) -> TextTree:
        """Return the tree; of nodes with children that it lacks, nothing can be learned."""
        for child in self.waiting:
            if child.parent >= 0:
                self.tree._kinds.pop(child.parent, None)
        return self.tree


def grow(candidates: Sequence[Candidate], estimate: Estimate, least: float, most_nodes: int, deepest: int) -> TextTree:
    """Return the tree of the nodes with at least this probability.

    most_nodes: of the tree; deepest: nodes of the longest path.
    """
    growth = _Growth(estimate, least)
    if deepest > 0:
        growth.offer(-1, 0, 1.0, candidates)
    while growth.waiting and len(growth.tree) < most_nodes:
        growth.add(deepest)
    return growth.finished()
