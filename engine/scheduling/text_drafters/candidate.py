"""Places in texts whose continuations may follow a request's text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_MATCH = 16
"""Longest match that is sought."""


class Candidate(NamedTuple):
    """Place in a text whose continuation may follow the request's text."""

    source: str
    text: Sequence[int]
    place: int
    """Index of the next token in `text`."""
    stop: int
    """Index after the last usable token."""
    evidence: int
    """Number of last tokens in which both texts agree."""
    repeats: bool = False
    """Whether the tokens from `place` to `stop` follow again after `stop`."""

    def token(self, depth: int) -> int | None:
        """Return the continuation's token at a depth, from 0 on; None after its end."""
        place = self.place + depth
        if place < self.stop:
            return self.text[place]
        if not self.repeats:
            return None
        return self.text[self.place + depth % (self.stop - self.place)]


def num_agreeing(text: Sequence[int], end: int, other: Sequence[int], other_end: int) -> int:
    """Return how many tokens before `end` and `other_end` agree, at most `LONGEST_MATCH`."""
    most = min(LONGEST_MATCH, end, other_end)
    count = 0
    while count < most and text[end - count - 1] == other[other_end - count - 1]:
        count += 1
    return count
