"""Cuts an answer at its stop strings, also if one spans several tokens or steps.

Text that may become a stop string is held back, so no character of one is ever released. An answer
may leave out the text of its special tokens. A stop string that spells such a token is looked for
in the text with these tokens, any other stop string in the text that the client sees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def num_held(text: str, marks: Sequence[str]) -> int:
    """Return the number of last characters of a text that may begin a mark."""
    longest_mark = max(map(len, marks), default=1)
    for size in range(min(len(text), longest_mark - 1), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks):
            return size
    return 0


class StopCut:
    """Filter that releases text once it certainly belongs to the answer."""

    def __init__(self, stops: Sequence[str], include: bool = False, hidden: Collection[str] = ()) -> None:
        """hidden: texts of the special tokens that the answer leaves out."""
        self._stops = tuple(stops)
        self._with_hidden = tuple(stop for stop in self._stops if any(text in stop for text in hidden))
        self._shown = tuple(stop for stop in self._stops if stop not in self._with_hidden)
        self._include = include
        self._held = ""
        self._num_early = 0
        """Characters of the held text in which no stop string may end."""
        self._places: list[int] = []
        """Places of the shown characters in the text that is held back."""
        self.stop: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self.stop is not None

    @property
    def looks_at_hidden(self) -> bool:
        """Whether a stop string spells a token that the answer leaves out."""
        return bool(self._with_hidden)

    def feed(self, text: str, looks: bool = True, hidden: str = "") -> str:
        """Take a piece of text and return the text to release; nothing after the first stop string.

        looks: False for text in which no stop string ends (before min_tokens); one may begin in it.
        hidden: text of a special token after the piece.
        """
        if self.is_cut:
            return ""
        if not self._stops:
            return text
        self._places += range(len(self._held), len(self._held) + len(text))
        self._held += text + hidden
        if not looks:
            self._num_early = len(self._held)
        shown = self._shown_text()
        hits = self._hits(shown)
        if hits:
            # The first complete stop string ends the answer, the longer stop string if two end
            # together.
            _, begin, self.stop = min(hits)
            released = self._release(begin)
            return released + self.stop if self._include else released
        end = len(self._held) - num_held(self._held, self._with_hidden)
        num_shown = len(shown) - num_held(shown, self._shown)
        if num_shown < len(shown):
            end = min(end, self._places[num_shown])
        return self._release(end)

    def _hits(self, shown: str) -> list[tuple[int, int, str]]:
        """Return (end, begin, stop string) of the complete stop strings in the held text."""
        hits = []
        num_early_shown = sum(place < self._num_early for place in self._places)
        for stop in self._with_hidden:
            begin = self._held.find(stop, max(0, self._num_early - len(stop) + 1))
            if begin >= 0:
                hits.append((begin + len(stop), begin, stop))
        for stop in self._shown:
            begin = shown.find(stop, max(0, num_early_shown - len(stop) + 1))
            if begin >= 0:
                last = self._places[begin + len(stop) - 1]
                hits.append((last + 1, self._places[begin], stop))
        return hits

    def finish(self) -> str:
        """Return the text held back, after the answer has ended without a stop string."""
        if self.is_cut:
            return ""
        return self._release(len(self._held))

    def _shown_text(self) -> str:
        if len(self._places) == len(self._held):
            return self._held
        return "".join(self._held[place] for place in self._places)

    def _release(self, count: int) -> str:
        """Take the first `count` characters of the held text; return the shown ones."""
        released = "".join(self._held[place] for place in self._places if place < count)
        self._places = [place - count for place in self._places if place >= count]
        self._held = self._held[count:]
        self._num_early = max(0, self._num_early - count)
        return released
