"""Cuts an answer at its stop strings, also if one spans several tokens or steps.

Text that may become a stop string is held back, so no character of one is ever released.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_held(text: str, marks: Sequence[str]) -> int:
    """Return the number of last characters of a text that may begin a mark; no whole mark may be among them."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    sizes = (size for size in range(longest, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks))
    return next(sizes, 0)


class StopCut:
    """Filter that releases text once it certainly belongs to the answer."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """Stop string that has ended the answer."""

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self.found is not None

    def feed(self, text: str, looks: bool = True) -> str:
        """Take a piece of text and return the text to release; nothing after the first stop string.

        looks: False for text in which stop strings do not count (before min_tokens).
        """
        if self.is_cut:
            return ""
        self._held += text
        if not self._stops or not looks:
            return self._release(len(self._held))
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            # The first complete stop string ends the answer, the longer one if two end together.
            at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self.found = stop
            return self._release(at + len(stop) if self._include else at)
        return self._release(len(self._held) - num_held(self._held, self._stops))

    def finish(self) -> str:
        """Return the text held back, after the answer has ended without a stop string."""
        return "" if self.is_cut else self._release(len(self._held))

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        return released
