"""The origin of each part of a streamed answer: drafted and accepted, or the target model's own token.

A stream sends text, and steps if the request has `return_drafts`. The first `num_accepted` of a step's tokens were
drafted. The text decides what is shown, tokens only colour it: special tokens are in no text, and a character may be
spread over several tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

Run = tuple[str, str]
"""(text, origin): ACCEPTED, OWN, or UNKNOWN."""
ACCEPTED, OWN, UNKNOWN = "accepted", "own", "unknown"
_PART = "�"
"""In the text of a token that holds a part of a character only."""


class Origins:
    """Finds the origin of text as it arrives."""

    def __init__(self) -> None:
        self._tokens: deque[Run] = deque()
        self._text = ""
        self._missed: str | None = None
        """Origin of the first token since the last that was found."""
        self._reach = 0
        """Most characters that tokens with parts of characters stand for."""

    def add(self, text: str, steps: Sequence[dict[str, Any]]) -> list[Run]:
        """Take text and the steps that came with it; return the runs whose origin is known now."""
        self._text += text
        for step in steps:
            for index, token in enumerate(step["tokens"]):
                self._tokens.append((token, ACCEPTED if index < step["num_accepted"] else OWN))
        runs: list[Run] = []
        while self._tokens and len(self._text) >= self._reach + len(self._tokens[0][0]):
            self._take(runs)
        return runs

    def rest(self) -> list[Run]:
        """Return the runs of the text that is left when the answer has ended."""
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
