"""Thoughts at the beginning of an answer: their budget, and a grammar that holds only after them.

Both are masks of single nodes: the allowed tokens depend on the answer and the drafted path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from engine.config import EngineFacts
from engine.plan import Grammar
from engine.request import Thinking

Bools = npt.NDArray[np.bool_]


class ThinkingGrammar:
    """Thoughts with their budget, and the grammar that holds after them, as one grammar."""

    def __init__(self, thinking: Thinking, facts: EngineFacts, grammar: Grammar | None = None) -> None:
        """Combine the thoughts of a request and its grammar."""
        self._thinking = thinking
        self._grammar = grammar
        self._only_close = np.zeros(facts.vocab_size, dtype=bool)
        self._only_close[thinking.closes] = True
        self._any: Bools | None = None
        if not thinking.may_end:
            self._any = np.ones(facts.vocab_size, dtype=bool)
            self._any[[token for token in facts.eos_token_ids if token < facts.vocab_size]] = False
        self._begin(())

    def _begin(self, answer: Sequence[int]) -> None:
        """Continue below this answer."""
        self._answer = tuple(answer)
        self._end = self._end_in(self._answer)

    def _end_in(self, tokens: tuple[int, ...]) -> int | None:
        """Return the index after the token that closes the thoughts, 0 if there are none, None if they are open or
        have not begun.
        """
        thinking = self._thinking
        if not thinking.is_begun and tokens[:1] not in ((), (thinking.opens,)):
            return 0
        return tokens.index(thinking.closes) + 1 if thinking.closes in tokens else None

    def _end_below(self, path: Sequence[int]) -> int | None:
        """Return the index in answer and path at which the text after the thoughts begins; None before it."""
        if self._end is not None:
            return self._end
        if not self._answer:
            return self._end_in(tuple(path))
        closes = self._thinking.closes
        return len(self._answer) + path.index(closes) + 1 if closes in path else None

    def check_answer(self, emitted: Sequence[int]) -> None:
        """Pass the tokens that a step has emitted after the thoughts to the grammar's check."""
        end = self._end_below(emitted)
        if self._grammar is not None and end is not None:
            self._grammar.check_answer(emitted[max(0, end - len(self._answer)) :])

    def allows(self, emitted: Sequence[int]) -> bool:
        """Whether the masks of thoughts allow the tokens that a step has emitted. If they do not, all masks of the
        request together left no token. `check_answer` checks a first token that may belong to the grammar.
        """
        for depth, token in enumerate(emitted):
            path, num_tokens = tuple(emitted[:depth]), len(self._answer) + depth
            begins = self._grammar is not None and not (self._thinking.is_begun or num_tokens)
            mask = None if begins or self._end_below(path) is not None else self._inside(num_tokens)
            if mask is not None and not mask[token]:
                return False
        return True

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> Callable[[], list[Bools | None]]:
        """Ask which tokens may follow an answer and each path below it, as in `plan.Grammar`."""
        self._begin(answer)
        num_answered = len(answer)
        ends = [self._end_below(path) for path in paths]
        # Thoughts are optional: the grammar may begin instead.
        begins = [not (self._thinking.is_begun or answer or path) for path in paths]
        masks = [
            self._inside(num_answered + len(path)) if end is None else None
            for end, path in zip(ends, paths, strict=True)
        ]
        if self._grammar is None:
            return lambda: masks
        asked = [n for n, end in enumerate(ends) if end is not None or begins[n]]
        over = self._end
        rests = [paths[n][max(0, (ends[n] or 0) - num_answered) :] for n in asked]
        wait = self._grammar.masks(() if over is None else answer[over:], rests)

        def found() -> list[Bools | None]:
            for n, mask in zip(asked, wait(), strict=True):
                if mask is not None and begins[n]:
                    mask = mask.copy()
                    mask[self._thinking.opens] = True
                masks[n] = mask
            return masks

        return found

    def _inside(self, num_tokens: int) -> Bools | None:
        """Return the mask after this many tokens of an answer whose thoughts are open or not begun; None for all."""
        thinking = self._thinking
        length = num_tokens - (not thinking.is_begun)
        is_over = thinking.budget is not None and length >= thinking.budget
        return self._only_close if is_over else self._any
