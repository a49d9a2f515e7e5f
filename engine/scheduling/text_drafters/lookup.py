"""Prompt lookup: if the last tokens of the text occurred in it before, the tokens after that place are a chain.

A longer match gives a longer chain.
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
        """Return the tokens that followed the text's last tokens when they occurred before; empty if they did not."""
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
        # A match that reaches the end of the text repeats itself.
        period = end - found
        return tuple(text[found + i % period] for i in range(min(MOST_TOKENS, 2 * length)))
