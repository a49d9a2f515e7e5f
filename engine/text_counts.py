"""Counts of an answer's tokens, for penalties; a step counts only the new ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TextCounts:
    """Counts of one sequence's text. A text only grows: a preempted sequence keeps its tokens."""

    def __init__(self, num_prompt: int) -> None:
        """Count from here; `num_prompt` tokens are in the text and not in the answer."""
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._token_E: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._times_E: npt.NDArray[np.float32] = np.empty(0, np.float32)

    def of(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return ([E] different tokens of the whole text, [E] how often each is in the answer).

        tokens: prompt and answer, at least as long as in the call before.
        """
        assert len(tokens) >= self._num_counted, "a text must not shrink"
        if more := tokens[self._num_counted :]:
            in_answer_T = np.arange(self._num_counted, len(tokens)) >= self._num_prompt
            token_X = np.concatenate([self._token_E, np.array(more, np.int64)])
            self._token_E, entry_X = np.unique(token_X, return_inverse=True)
            times_X = np.concatenate([self._times_E, in_answer_T])
            self._times_E = np.bincount(entry_X, times_X).astype(np.float32)
            self._num_counted = len(tokens)
        return self._token_E, self._times_E
