"""Text drafts of a request as one tree: the most probable continuations of its text.

A node's children are the next tokens of the candidates that agree so far. Together the children are
as probable as the most trusted candidate, and share this probability by the odds of their
candidates. An estimate decides which drafts are worth their time, and never how they are verified.
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
"""Probability of a right continuation, by drafter and number of agreeing tokens."""
Kind = tuple[str, int]
"""Arguments of an `Estimate`."""


class TextTree:
    """Nodes, the most probable first; a parent comes before its children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        """Parent of each node; -1 is the end of the text."""
        self.depths: list[int] = []
        """Depth of each node, from 0."""
        self.probabilities: list[float] = []
        """Estimated probability of each node's path."""
        self._sources: list[str] = []
        self._kinds: dict[int, Kind] = {}
        """Most trusted candidate below each node whose children are all known."""
        self._first_tokens: frozenset[int] = frozenset()
        """Next tokens of all candidates, also of improbable ones."""

    def __len__(self) -> int:
        return len(self.tokens)

    def chains(self, numbers: Sequence[int]) -> tuple[TextDraft, ...]:
        """Return the chains that together have these nodes; with a node come all above it."""
        inner = {self.parents[number] for number in numbers}
        ends = [number for number in numbers if number not in inner]
        return tuple([TextDraft(self._sources[end], self._path(end)) for end in ends])

    def _path(self, number: int) -> tuple[int, ...]:
        tokens = []
        while number >= 0:
            tokens.append(self.tokens[number])
            number = self.parents[number]
        return tuple(tokens[::-1])

    def outcomes(self, emitted: Sequence[int]) -> list[tuple[Kind, bool]]:
        """Return (kind, whether the next token was a child) for each passed node."""
        edges = zip(self.parents, self.tokens, strict=True)
        children = dict(zip(edges, range(len(self)), strict=True))
        outcomes = []
        node: int | None = -1
        for token in emitted:
            if node is None or node not in self._kinds:
                break
            child = children.get((node, token))
            is_right = child is not None
            if node < 0:
                is_right = token in self._first_tokens
            outcomes.append((self._kinds[node], is_right))
            node = child
        return outcomes


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
        self._estimate = estimate
        self._least = least
        self._numbers = count()

    def offer(self, parent: int, depth: int, probability: float, agreeing: Sequence[Candidate]) -> None:
        """Add next tokens of candidates that agree with a parent's path.

        depth: of the children; probability: of the parent's path.
        """
        odds: dict[int, float] = {}
        by_token: dict[int, list[Candidate]] = {}
        best = 0.0
        kind = None
        for candidate in agreeing:
            token = candidate.token(depth)
            if token is None:
                continue
            evidence = min(candidate.evidence + depth, LONGEST_MATCH)
            trust = self._estimate(candidate.source, evidence)
            odds[token] = odds.get(token, 0.0) + trust / (1.0 - trust)
            by_token.setdefault(token, []).append(candidate)
            if trust > best:
                best = trust
                kind = (candidate.source, evidence)
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
                order = next(self._numbers)
                heappush(self.waiting, _Child(-share, order, parent, token, by_token[token]))

    def add(self, deepest: int) -> None:
        """Make the most probable child a node."""
        child = heappop(self.waiting)
        tree = self.tree
        number = len(tree)
        depth = tree.depths[child.parent] + 1 if child.parent >= 0 else 0
        tree.tokens.append(child.token)
        tree.parents.append(child.parent)
        tree.depths.append(depth)
        tree.probabilities.append(-child.negative_probability)
        tree._sources.append(max(child.agreeing, key=attrgetter("evidence")).source)
        if depth + 1 < deepest:
            self.offer(number, depth + 1, -child.negative_probability, child.agreeing)

    def finished(self) -> TextTree:
        """Return the tree. Nothing can be learned of nodes with children that the tree lacks."""
        for child in self.waiting:
            if child.parent >= 0:
                self.tree._kinds.pop(child.parent, None)
        return self.tree


def grow(
    candidates: Sequence[Candidate],
    estimate: Estimate,
    least: float,
    most_nodes: int,
    deepest: int,
) -> TextTree:
    """Return the tree of at most `most_nodes` nodes with at least this probability.

    deepest: nodes of the longest path.
    """
    growth = _Growth(estimate, least)
    if deepest > 0:
        growth.offer(-1, 0, 1.0, candidates)
    while growth.waiting and len(growth.tree) < most_nodes:
        growth.add(deepest)
    return growth.finished()
