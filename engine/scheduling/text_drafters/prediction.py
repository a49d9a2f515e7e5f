"""Predictions: the client sends the probable answer.

The draft is the continuation in the prediction. It starts at the beginning. Once the answer has
left the prediction, the draft starts after the next place where the answer's last tokens occur in
it, or, after a long match, one token further on. The rest is trusted more after a longer match.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import PREDICTION
from engine.scheduling.text_drafters.candidate import Candidate

_MATCH = 3


class PredictionDrafter:
    """Tracks the position of an answer in its prediction."""

    def __init__(self, prediction: Sequence[int], num_prompt: int) -> None:
        """num_prompt: tokens of the text before the answer."""
        self.prediction = tuple(prediction)
        self._num_prompt = num_prompt
        self._ends_of: dict[tuple[int, ...], list[int]] = {}
        for stop in range(_MATCH, len(self.prediction) + 1):
            self._ends_of.setdefault(self.prediction[stop - _MATCH : stop], []).append(stop)
        self.position: int | None = 0
        """Index of the prediction's next token; None outside of the prediction."""
        self._last = 0
        """Position at which the answer last left the prediction."""
        self._run = 0
        """Tokens of the present match."""
        self._num_seen = 0
        """Tokens of the answer so far."""

    def candidates(self, text: Sequence[int]) -> list[Candidate]:
        """Return where the prediction continues a text, which ends with the answer so far."""
        answer = text[self._num_prompt :]
        for end in range(self._num_seen + 1, len(answer) + 1):
            self._follow(answer, end)
        self._num_seen = max(self._num_seen, len(answer))
        if self.position is None:
            return []
        stop = len(self.prediction)
        return [Candidate(PREDICTION, self.prediction, self.position, stop, self._run)]

    def _follow(self, answer: Sequence[int], end: int) -> None:
        """Advance by the answer's token before `end`."""
        if self.position is not None:
            expected = self.prediction[self.position : self.position + 1]
            if expected == (answer[end - 1],):
                self.position += 1
                self._run += 1
                return
            self._last = self.position
        ends = self._ends_of.get(tuple(answer[max(0, end - _MATCH) : end]), [])
        if ends:
            self.position = next((stop for stop in ends if stop >= self._last), ends[0])
            self._run = _MATCH
            return
        # After a long match, a single token may have been replaced.
        self.position = self._last + 1 if self._run >= _MATCH else None
        self._run = 0

    def num_predicted(self, text: Sequence[int], emitted: Sequence[int]) -> int:
        """Return how many of the tokens emitted after the text the prediction contained."""
        self.candidates(text)
        if self.position is None:
            return 0
        count = 0
        for token, expected in zip(emitted, self.prediction[self.position :], strict=False):
            if token != expected:
                break
            count += 1
        return count
