"""Index of a growing text: where its last tokens occurred before.

For every position it holds the previous position with the same last tokens, of a few lengths, as
compressors do. So 100,000 tokens take about 12 MB and a tenth of a second, and a question looks at
a bounded number of places. A suffix automaton finds the longest match of all, with ten times the
memory, and its drafts were not better (measured).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from engine.scheduling.text_drafters.candidate import num_agreeing

_LENGTHS = 4, 1
"""Numbers of last tokens by which places are found, longest first."""
_MOST_PLACES = 8
"""Latest places examined for each length."""


class TextIndex:
    """Ends of equal tokens in a growing text."""

    def __init__(self) -> None:
        self.num_read = 0
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in _LENGTHS)
        """Latest end of each tuple of tokens, by its hash."""
        self._previous = tuple(array("l", [0]) for _ in _LENGTHS)
        """[1 + tokens] Previous end of the same tokens; 0 for none."""

    def read(self, text: Sequence[int]) -> None:
        """Add the tokens of the text that are new since the last call."""
        for end in range(self.num_read + 1, len(text) + 1):
            tables = zip(_LENGTHS, self._latest, self._previous, strict=True)
            for length, latest, previous in tables:
                start = end - length
                key = hash(tuple(text[start:end])) if start >= 0 else start
                previous.append(latest.get(key, 0))
                latest[key] = end
        self.num_read = max(self.num_read, len(text))

    def own_ends(self, text: Sequence[int]) -> dict[int, int]:
        """Return earlier ends of the text's last tokens, with the number of agreeing tokens."""
        latest = [previous[len(text)] for previous in self._previous]
        return self._ends(text, text, latest)

    def ends_in(self, read: Sequence[int], text: Sequence[int]) -> dict[int, int]:
        """Return the same for the last tokens of another text; read: the text that was read."""
        keys = [hash(tuple(text[-length:])) for length in _LENGTHS]
        latest = [latest.get(key, 0) for latest, key in zip(self._latest, keys, strict=True)]
        return self._ends(read, text, latest)

    def _ends(self, read: Sequence[int], text: Sequence[int], latest: list[int]) -> dict[int, int]:
        """Return the ends at which the texts agree, with the number of agreeing tokens."""
        agreeing: dict[int, int] = {}
        for first, previous in zip(latest, self._previous, strict=True):
            for end in _chain(first, previous):
                if end in agreeing:
                    continue
                count = num_agreeing(text, len(text), read, end)
                if count:
                    agreeing[end] = count
        return agreeing


def _chain(first: int, previous: array[int]) -> Iterator[int]:
    """Yield the latest ends, at most `_MOST_PLACES`."""
    end = first
    for _ in range(_MOST_PLACES):
        if not end:
            return
        yield end
        end = previous[end]
