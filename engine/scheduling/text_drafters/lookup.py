"""Prompt lookup: when the last tokens of the text have been in it before, what followed them then is a chain.

A chain is the longer, the longer the match is.
"""

from __future__ import annotations

from collections.abc import Sequence

_MATCH = 3
_LONGEST_MATCH = 16
MOST_TOKENS = 16
"""Longest chain."""


class LookupDrafter:
    """Finds the last tokens of a growing text in the same text."""

    def __init__(self) -> None:
        self._end_of: dict[tuple[int, ...], int] = {}
        self._num_seen = 0

    def chain(self, text: Sequence[int]) -> tuple[int, ...]:
        """What followed the text's last tokens when they were there before; nothing where they were not."""
        end = len(text)
        for stop in range(max(_MATCH, self._num_seen), end):
            self._end_of[tuple(text[stop - _MATCH : stop])] = stop
        self._num_seen = max(end, self._num_seen)
        found = self._end_of.get(tuple(text[end - _MATCH :])) if end >= _MATCH else None
        if found is None:
            return ()
        length = _MATCH
        while length < min(_LONGEST_MATCH, found) and text[found - length - 1] == text[end - length - 1]:
            length += 1
        # A match that runs into the text's end repeats itself.
        period = end - found
        return tuple(text[found + i % period] for i in range(min(MOST_TOKENS, 2 * length)))
