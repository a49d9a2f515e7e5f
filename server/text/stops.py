"""Cuts an answer at its stop strings, also when one spans several tokens or accepted runs.

No character of a stop string is ever released: text that may become one is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopCut:
    """Feeds on text, releases what is certain to belong to the answer."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that has ended the answer."""

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self.found is not None

    def feed(self, text: str, looks: bool = True) -> str:
        """Text that may be released now; after the first stop string nothing more.

        looks: False for text in which a stop string does not count (before min_tokens).
        """
        if self.is_cut:
            return ""
        self._held += text
        if not self._stops or not looks:
            return self._release(len(self._held))
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            # The stop string that is complete first ends the answer; the longer one where two end together.
            at, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self.found = stop
            return self._release(at + len(stop) if self._include else at)
        return self._release(len(self._held) - self._num_pending())

    def finish(self) -> str:
        """What was held back, once the answer has ended without a stop string."""
        return "" if self.is_cut else self._release(len(self._held))

    def _num_pending(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        return released
