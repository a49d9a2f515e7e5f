"""Edits of one request's logits that do not depend on its tokens, as arrays that are built once.

A step edits the logits of hundreds of nodes. Everything whose size a client controls (65,536
allowed tokens, 1,024 biases) is prepared here, so that a node only reads it. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from engine.request import Sampling

Bools = npt.NDArray[np.bool_]


class FixedEdits:
    """Bias and masks of the requests of one call, which share the lists that the client sent."""

    def __init__(self, sampling: Sampling, ends: Sequence[int]) -> None:
        """Prepare the edits; `ends` are tokens that are masked until min_tokens."""
        self.source = sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words
        self.bias_tokens = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.bias_values = np.array([added for _, added in sampling.logit_bias], np.float32)
        self._allowed = np.array(sampling.allowed_token_ids, np.int64)
        words = dict.fromkeys(sampling.bad_words)
        self._barred = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._words: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Bad words of several tokens, by the last token but one."""
        for word in words:
            if len(word) > 1:
                self._words[word[-2]].append(word)
        self._longest = max(map(len, words), default=0)
        self._ends = np.array(ends, np.int64)
        self._masks: dict[tuple[int, bool], Bools | None] = {}

    def mask(self, vocab_size: int, holds_back: bool) -> Bools | None:
        """Return [V] the tokens that the fixed masks allow; None for all. Read-only.

        holds_back: whether end tokens are masked.
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

    def allowed(self, vocab_size: int, holds_back: bool, tokens: Sequence[int], path: Sequence[int]) -> Bools | None:
        """Return [V] the tokens that may follow a text and a path; None for all. Read-only."""
        allowed = self.mask(vocab_size, holds_back)
        if barred := self.barred_after(tokens, path):
            allowed = np.ones(vocab_size, dtype=bool) if allowed is None else allowed.copy()
            allowed[barred] = False
        return allowed

    def has_dead_end(self, tokens: Sequence[int], emitted: Sequence[int], num_held: int, vocab_size: int) -> bool:
        """Return whether an emitted token is masked: then the masks had left none.

        num_held: emitted tokens before which end tokens are masked.
        """
        for depth, token in enumerate(emitted):
            allowed = self.mask(vocab_size, depth < num_held)
            if allowed is not None and not allowed[token]:
                return True
            if token in self.barred_after(tokens, emitted[:depth]):
                return True
        return False

    def barred_after(self, tokens: Sequence[int], path: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a bad word of several tokens."""
        if not self._words or not (path or tokens):
            return []
        words = self._words.get(path[-1] if path else tokens[-1])
        if not words:
            return []
        tail = (*tokens[-self._longest :], *path)
        return [word[-1] for word in words if tail[1 - len(word) :] == word[:-1]]


class SharedEdits:
    """Edits of the running requests, each built once for all requests that share it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[object, ...], FixedEdits] = WeakValueDictionary()

    def of(self, sampling: Sampling, ends: tuple[int, ...]) -> FixedEdits:
        """Return the edits of a request, shared by identity of the objects."""
        source = sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words
        key = (*map(id, source), ends)
        edits = self._known.get(key)
        if edits is None:
            edits = self._known[key] = FixedEdits(sampling, ends)
        return edits
