"""Finds the origin of each part of a streamed answer: accepted draft, or the target's own token.

A stream sends text, and steps if the request has `return_drafts`. The first `num_accepted` tokens
of a step were drafted. The text is shown as it is; tokens only color it: special tokens are not in
the text, and a character may span several tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

Run = tuple[str, str]
"""Text and origin: ACCEPTED, OWN or UNKNOWN."""
ACCEPTED, OWN, UNKNOWN = "accepted", "own", "unknown"
_PART = "�"
"""Mark in the text of a token with a part of a character."""


class Origins:
    """Incremental search for the origin of text."""

    def __init__(self) -> None:
        self._tokens: deque[Run] = deque()
        self._text = ""
        self._missed: str | None = None
        """Origin of the first token after the last one that was found."""
        self._reach = 0
        """Maximum number of characters of tokens with parts of characters."""

    def add(self, text: str, steps: Sequence[dict[str, Any]]) -> list[Run]:
        """Take text and its steps; return the runs whose origin is known."""
        self._text += text
        for step in steps:
            for index, token in enumerate(step["tokens"]):
                self._tokens.append((token, ACCEPTED if index < step["num_accepted"] else OWN))
        runs: list[Run] = []
        while self._tokens and len(self._text) >= self._reach + len(self._tokens[0][0]):
            self._take(runs)
        return runs

    def rest(self) -> list[Run]:
        """Return the remaining runs after the end of the answer."""
        runs: list[Run] = []
        while self._tokens:
            self._take(runs)
        if self._text:
            runs.append((self._text, self._missed or UNKNOWN))
        return runs

    def _take(self, runs: list[Run]) -> None:
        """Find the next token in the text; text before it belongs to tokens that were not found."""
        token, origin = self._tokens.popleft()
        place = -1 if not token or _PART in token else self._text.find(token, 0, self._reach + len(token))
        if place < 0:
            self._missed = self._missed or origin
            self._reach += len(token) + 1 if _PART in token else 0
            return
        if place:
            runs.append((self._text[:place], self._missed or UNKNOWN))
        runs.append((token, origin))
        self._text = self._text[place + len(token) :]
        self._missed, self._reach = None, 0
