"""Edits of one request's logits that no token changes, as arrays that are made once.

A step edits the logits of hundreds of nodes. Whatever grows with what a client sends (65,536 allowed tokens, 1,024
biases) is prepared here, so that a node costs no more than reading it. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import Sampling

Bools = npt.NDArray[np.bool_]


class FixedEdits:
    """Bias and masks of one request."""

    def __init__(self, sampling: Sampling, ends: Sequence[int]) -> None:
        """ends: tokens that are held back before min_tokens."""
        self.bias_tokens = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.bias_values = np.array([added for _, added in sampling.logit_bias], np.float32)
        self._allowed = np.array(sampling.allowed_token_ids, np.int64)
        words = dict.fromkeys(sampling.bad_words)
        self._barred = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._words: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Bad words of several tokens, by the token before their last one."""
        for word in words:
            if len(word) > 1:
                self._words[word[-2]].append(word)
        self._longest = max(map(len, words), default=0)
        self._ends = np.array(ends, np.int64)
        self._masks: dict[tuple[int, bool], Bools | None] = {}

    def mask(self, vocab_size: int, holds_back: bool) -> Bools | None:
        """[V] tokens that may come next as far as that is always the same; None for all. Not to be written to.

        holds_back: whether no end may come yet.
        """
        key = vocab_size, holds_back
        if key not in self._masks:
            self._masks[key] = self._new_mask(vocab_size, holds_back)
        return self._masks[key]

    def _new_mask(self, vocab_size: int, holds_back: bool) -> Bools | None:
        if not (len(self._allowed) or len(self._barred) or holds_back):
            return None
        mask = np.full(vocab_size, not len(self._allowed))
        mask[self._allowed] = True
        mask[self._barred] = False
        if holds_back:
            mask[self._ends[(self._ends >= 0) & (self._ends < vocab_size)]] = False
        mask.flags.writeable = False
        return mask

    def barred_after(self, tokens: Sequence[int], path: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word of several tokens after a text and a path below it."""
        if not self._words or not (path or tokens):
            return []
        words = self._words.get(path[-1] if path else tokens[-1])
        if not words:
            return []
        tail = (*tokens[-self._longest :], *path)
        return [word[-1] for word in words if tail[1 - len(word) :] == word[:-1]]
