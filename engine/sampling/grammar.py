"""Grammars: which tokens may follow an answer and a path of drafted tokens below it. Built on llguidance.

A grammar is a string that llguidance reads (from a JSON schema, a regular expression or Lark). One matcher per request
follows the answer, and a copy of it (1 us) goes down every drafted path, so each node of each branch has its own mask.
Copies, because llguidance 1.9 does not always come back to where it was: after some rollbacks the next mask is another.
Not for: making grammars of what a client asked (`server/structured.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from engine.errors import RequestError
from engine.files import model_file

Bools = npt.NDArray[np.bool_]


class GrammarState:
    """Where a request's answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._num_consumed = 0

    def allowed(self, answer: Sequence[int], path: Sequence[int]) -> Bools | None:
        """[V] which tokens may follow; None below a path that the grammar has no law for (it has ended before).

        answer: the request's tokens so far; it only grows from call to call.
        """
        if self._num_consumed < len(answer):
            self._matcher.consume_tokens(list(answer[self._num_consumed :]))
            self._num_consumed = len(answer)
        if not self._ends.isdisjoint(path):
            return None
        matcher = self._matcher.deep_copy() if path else self._matcher
        if (path and not matcher.consume_tokens(list(path))) or matcher.is_error():
            # A limit of llguidance, or a path off the grammar: nothing may follow but the end.
            ended = np.zeros(self._vocab_size, dtype=bool)
            ended[[token for token in self._ends if token < self._vocab_size]] = True
            return ended
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)


class Grammars:
    """Starts grammars over one model's vocabulary."""

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int], revision: str | None = None
    ) -> None:
        """tokenizer: a folder with tokenizer.json, or a hub name; read when the first grammar is started.

        revision: of the hub's repository.
        """
        self._name, self._revision = tokenizer, revision
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def start(self, grammar: str) -> GrammarState:
        """A state at the beginning of an answer; raises RequestError for a grammar that cannot be followed."""
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be used: {_first_line(matcher.get_error())}", "response_format")
        return GrammarState(matcher, self._vocab_size, frozenset(self._vocabulary().eos_tokens))

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                file = model_file(self._name, "tokenizer.json", self._revision)
                if file is None:
                    raise FileNotFoundError("there is none")
                source = str(file)
                size = max(self._vocab_size, LLTokenizer(source).vocab_size)
                self._tokenizer = LLTokenizer(source, n_vocab=size, eos_token=self._eos_token_ids or None)
            except Exception as error:  # llguidance raises many kinds
                raise RequestError(
                    f"structured output needs the model's tokenizer.json; it cannot be read: {_first_line(str(error))}",
                    "response_format",
                ) from error
        return self._tokenizer


def _first_line(text: str) -> str:
    return (text.strip() or "unknown error").splitlines()[0]
