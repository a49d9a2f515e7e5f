"""Prompt lookup: the tokens after earlier places of the text at which its last tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import PROMPT_LOOKUP
from engine.scheduling.text_drafters.candidate import Candidate
from engine.scheduling.text_drafters.index import TextIndex


class LookupDrafter:
    """Finds the last tokens of a growing text in the same text."""

    def __init__(self) -> None:
        self._index = TextIndex()

    def candidates(self, text: Sequence[int]) -> list[Candidate]:
        """Return the places after which the text may go on as it did before."""
        self._index.read(text)
        # A match that reaches the end of the text repeats itself.
        return [
            Candidate(PROMPT_LOOKUP, text, end, len(text), count, repeats=True)
            for end, count in self._index.own_ends(text).items()
        ]
