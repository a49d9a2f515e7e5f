"""Breaks the lines of a streamed text between words, where a terminal breaks within them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Styled = tuple[str, str]
"""(style, text)."""


class WordWrap:
    """Wraps styled pieces of a text as they arrive. A word waits until the space after it."""

    def __init__(self, num_columns: int, width: Callable[[str], int] = len) -> None:
        """width: columns of a text, without line breaks."""
        self._num_columns = num_columns
        self._width = width
        self._column = 0
        self._spaces: list[Styled] = []
        self._word: list[Styled] = []

    def feed(self, style: str, text: str) -> Iterator[Styled]:
        """Yield what can be printed after a further piece."""
        for part in re.findall(r"\n|[^\S\n]+|\S+", text):
            if not part.isspace():
                self._word.append((style, part))
                continue
            yield from self.flush()
            if part == "\n":
                self._column, self._spaces = 0, []
                yield style, part
            else:
                self._spaces.append((style, part))

    def flush(self) -> Iterator[Styled]:
        """Yield the word that waits, on a new line if it does not fit."""
        if not self._word:
            return
        spaces, word = self._spaces, self._word
        self._spaces, self._word = [], []
        word_width = self._width_of(word)
        if self._column + self._width_of(spaces) + word_width > self._num_columns:
            if self._column:
                yield "", "\n"
            self._column = 0
        else:
            self._column += self._width_of(spaces)
            yield from spaces
        # The terminal breaks a word that is longer than a line.
        self._column = (self._column + word_width - 1) % self._num_columns + 1
        yield from word

    def _width_of(self, parts: list[Styled]) -> int:
        return sum(self._width(text) for _, text in parts)
