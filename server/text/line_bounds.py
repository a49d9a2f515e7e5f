"""Ends an answer at a line indented too little, or after a time, for editors.

The first line continues a line of the editor, so both bounds apply from the first line break on. A
blank line has no indentation to compare.
"""

from __future__ import annotations

import time

_BLANK = " \t"


class LineBounds:
    """Filter that releases text until the bounds end the answer."""

    def __init__(self, min_indent: int = 0, most_s: float = 0.0) -> None:
        """min_indent: least white space before text. most_s: seconds from the first text on."""
        self._min_indent = min_indent
        self._most_s = most_s
        self._begun_s: float | None = None
        self._has_break = False
        self._indent: int | None = None
        """White space of the line so far; None after another character."""
        self.is_over = False
        """Whether the answer has ended."""

    def feed(self, text: str) -> str:
        """Take a piece of text and return the text to release; nothing after the end."""
        if self.is_over or not text:
            return ""
        now_s = time.monotonic()
        if self._begun_s is None:
            self._begun_s = now_s
        kept = self._indented(text)
        is_late = 0 < self._most_s < now_s - self._begun_s
        if is_late and self._has_break:
            self.is_over = True
        return kept

    def _indented(self, text: str) -> str:
        """Return the text before the first line whose indentation is too small."""
        for place, character in enumerate(text):
            if character == "\n":
                self._has_break = True
                self._indent = 0
            elif self._indent is None:
                continue
            elif character in _BLANK:
                self._indent += 1
            elif character != "\r" and self._indent < self._min_indent:
                self.is_over = True
                return text[:place]
            elif character != "\r":
                self._indent = None
        return text
