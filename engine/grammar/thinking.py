"""Thoughts at the beginning of an answer: their budget, and a grammar that holds only after them.

Thoughts stand between two marks. In formats in which the rest of the answer begins with a mark, too
(its lead), there may be several thoughts. All masks are masks of single nodes: the allowed tokens
depend on the answer and the drafted path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from engine.config import EngineFacts
from engine.plan import Grammar
from engine.request import Thinking

Bools = npt.NDArray[np.bool_]
Route = tuple[int, ...] | None
"""Tokens of a mark still to come; None if the text does not lead there."""


class _At(Enum):
    BETWEEN = auto()
    """Before thoughts or the rest of the answer."""
    INSIDE = auto()
    OTHER = auto()
    """In text with neither mark; thoughts may follow."""
    OVER = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    """Place in an answer."""

    at: _At
    num_tokens: int = 0
    num_thought: int = 0
    """Tokens of thoughts, without marks."""
    to_thoughts: Route = None
    to_answer: Route = None
    end: int = 0
    """Tokens before the rest of the answer, once it has begun."""


class ThinkingGrammar:
    """Thoughts with their budget, and the grammar that holds after them, as one grammar."""

    def __init__(self, thinking: Thinking, facts: EngineFacts, grammar: Grammar | None = None) -> None:
        """Combine the thoughts of a request and its grammar."""
        self._thinking = thinking
        self._grammar = grammar
        self._size = facts.vocab_size
        self._only_close = self._only(thinking.closes)
        self._any: Bools | None = None
        if not thinking.may_end:
            self._any = np.ones(self._size, dtype=bool)
            self._any[[token for token in facts.eos_token_ids if token < self._size]] = False
            # A mark of the answer within thoughts would begin it unseen.
            self._any[[*thinking.between[:1], *thinking.lead[:1]]] = False
        self._answer: tuple[int, ...] = ()
        self._place = _Place(_At.INSIDE) if thinking.is_begun else self._before(())

    def _only(self, *tokens: int) -> Bools:
        mask = np.zeros(self._size, dtype=bool)
        mask[list(tokens)] = True
        return mask

    def _before(self, between: tuple[int, ...], num_tokens: int = 0, num_thought: int = 0) -> _Place:
        """Return the place before thoughts or the rest of the answer."""
        thinking = self._thinking
        return _Place(_At.BETWEEN, num_tokens, num_thought, between + thinking.opens, between + thinking.lead)

    def _begin(self, answer: Sequence[int]) -> None:
        answer = tuple(answer)
        num_known = len(self._answer)
        if answer[:num_known] != self._answer:
            num_known = 0
            self._place = _Place(_At.INSIDE) if self._thinking.is_begun else self._before(())
        self._answer = answer
        self._place = self._after(self._place, answer[num_known:])

    def _after(self, place: _Place, tokens: Sequence[int]) -> _Place:
        for token in tokens:
            if place.at is _At.OVER:
                return place
            place = self._next(place, token)
        return place

    def _next(self, place: _Place, token: int) -> _Place:
        if place.at is _At.BETWEEN:
            return self._along(place, token)
        num_tokens = place.num_tokens + 1
        num_thought = place.num_thought
        if token == self._thinking.closes:
            if not self._thinking.lead:
                return _Place(_At.OVER, num_tokens, num_thought, end=num_tokens)
            return self._before(self._thinking.between, num_tokens, num_thought)
        if place.at is _At.INSIDE:
            return _Place(_At.INSIDE, num_tokens, num_thought + 1)
        return self._other(place, token)

    def _other(self, place: _Place, token: int) -> _Place:
        """Return the place after a token of text without marks, in which thoughts may begin."""
        opens = self._thinking.opens
        num_tokens = place.num_tokens + 1
        for to_thoughts in (place.to_thoughts, opens):
            route = _beyond(to_thoughts, token)
            if route == ():
                return _Place(_At.INSIDE, num_tokens, place.num_thought, route)
            if route is not None:
                return _Place(_At.OTHER, num_tokens, place.num_thought, route)
        return _Place(_At.OTHER, num_tokens, place.num_thought, opens)

    def _along(self, place: _Place, token: int) -> _Place:
        """Return the place after a token before thoughts or the rest of the answer."""
        num_tokens = place.num_tokens + 1
        num_thought = place.num_thought
        to_thoughts = _beyond(place.to_thoughts, token)
        to_answer = _beyond(place.to_answer, token)
        if to_thoughts == ():
            return _Place(_At.INSIDE, num_tokens, num_thought)
        if to_answer == ():
            return _Place(_At.OVER, num_tokens, num_thought, end=num_tokens)
        if to_thoughts is not None or to_answer is not None:
            return _Place(_At.BETWEEN, num_tokens, num_thought, to_thoughts, to_answer)
        if self._thinking.lead:
            return self._other(place, token)
        return _Place(_At.OVER, num_tokens, num_thought)

    def _asks(self, place: _Place) -> bool:
        """Whether the client's grammar may begin at a place, or has begun before it."""
        return self._grammar is not None and (place.at is _At.OVER or place.to_answer == ())

    def check_answer(self, emitted: Sequence[int]) -> None:
        """Pass the tokens that a step has emitted after the thoughts to the grammar's check."""
        place = self._after(self._place, emitted)
        if self._grammar is not None and place.at is _At.OVER:
            self._grammar.check_answer(emitted[max(0, place.end - len(self._answer)) :])

    def allows(self, emitted: Sequence[int]) -> bool:
        """Return whether the masks of thoughts allow a step's tokens.

        If not, all masks together left no token. `check_answer` checks a first token that may
        belong to the grammar.
        """
        place = self._place
        for token in emitted:
            mask = None if self._asks(place) else self._mask(place)
            if mask is not None and not mask[token]:
                return False
            place = self._after(place, (token,))
        return True

    def masks(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> Callable[[], list[Bools | None]]:
        """Ask which tokens may follow an answer and each path below it, as in `plan.Grammar`."""
        self._begin(answer)
        places = [self._after(self._place, path) for path in paths]
        masks = [self._mask(place) for place in places]
        if self._grammar is None:
            return lambda: masks
        begun = answer[self._place.end :] if self._place.at is _At.OVER else ()
        asked = [number for number, place in enumerate(places) if self._asks(place)]
        rests = [paths[number][max(0, places[number].end - len(answer)) :] for number in asked]
        wait_for_grammar = self._grammar.masks(begun, rests)

        def wait_for_masks() -> list[Bools | None]:
            for number, mask in zip(asked, wait_for_grammar(), strict=True):
                if mask is not None and places[number].at is _At.BETWEEN:
                    # Thoughts are optional: the grammar may begin instead.
                    mask = mask.copy()
                    mask[self._thinking.opens[0]] = True
                masks[number] = mask
            return masks

        return wait_for_masks

    def _mask(self, place: _Place) -> Bools | None:
        """Return the mask of the thoughts and marks at a place; None if all tokens may follow."""
        budget = self._thinking.budget
        is_spent = budget is not None and place.num_thought >= budget
        if place.at is _At.INSIDE:
            return self._only_close if is_spent else self._any
        if place.at is _At.OVER or (place.at is _At.BETWEEN and place.to_answer == ()):
            return None
        to_thoughts = place.to_thoughts[0] if place.to_thoughts else None
        to_answer = place.to_answer[0] if place.to_answer else None
        must_answer = is_spent and bool(self._thinking.lead) and to_answer != to_thoughts
        if self._grammar is None:
            has_begun = place.to_thoughts != self._thinking.opens
            if to_thoughts is not None and has_begun and must_answer:
                return ~self._only(to_thoughts)
            return None
        allowed = [to_answer] if must_answer else [to_thoughts, to_answer]
        return self._only(*(token for token in allowed if token is not None))


def _beyond(route: Route, token: int) -> Route:
    """Return the rest of a mark after a token; None if the token does not belong to it."""
    if route and route[0] == token:
        return route[1:]
    return None
