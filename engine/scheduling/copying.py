"""Chains that are copied instead of drawn: from a prediction that came with the request, and from the text itself.

*Prompt lookup*: when the last tokens of the text have been in it before, what followed them then is a chain.
*Prediction*: the client says what the answer will probably be; the chain is what follows in it, from its beginning,
behind a divergence from the place where the last tokens are in it again (or, behind a good run, one token further).

What is proposed is a function of the text alone, token by token: it survives preemption and does not depend on how the
text came about. A chain is longer the longer its source has been right.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import PREDICTION, PROMPT_LOOKUP
from engine.plan import Copy

_MATCH = 3
_LONGEST_MATCH = 16
_MOST_LOOKED_UP = 16
_TRUST = 8


def most_copied(longest_chain: int) -> int:
    """Most tokens that are copied for one request at once."""
    return longest_chain + min(_MOST_LOOKED_UP, longest_chain)


class Lookup:
    """Finds the last tokens of a growing text in the same text."""

    def __init__(self) -> None:
        self._end_of: dict[tuple[int, ...], int] = {}
        self._num_seen = 0

    def chain(self, text: Sequence[int]) -> tuple[int, ...]:
        """What followed the text's last tokens when they were there before; nothing where they were not."""
        end = len(text)
        for stop in range(max(_MATCH, self._num_seen), end):
            self._end_of[tuple(text[stop - _MATCH : stop])] = stop
        self._num_seen = max(end, self._num_seen)
        found = self._end_of.get(tuple(text[end - _MATCH :])) if end >= _MATCH else None
        if found is None:
            return ()
        length = _MATCH
        while length < min(_LONGEST_MATCH, found) and text[found - length - 1] == text[end - length - 1]:
            length += 1
        # A match that runs into the text's end repeats itself.
        period = end - found
        return tuple(text[found + i % period] for i in range(min(_MOST_LOOKED_UP, 2 * length)))


class Follower:
    """Where an answer is in its prediction."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction = tuple(prediction)
        self._ends_of: dict[tuple[int, ...], list[int]] = {}
        for stop in range(_MATCH, len(self.prediction) + 1):
            self._ends_of.setdefault(self.prediction[stop - _MATCH : stop], []).append(stop)
        self.position: int | None = 0
        """Index of the prediction's token that should come next; None where the answer is not in it."""
        self._last = 0
        self._run = 0
        self._num_seen = 0

    def chain(self, answer: Sequence[int]) -> tuple[int, ...]:
        """What the prediction says comes after the answer."""
        for end in range(self._num_seen + 1, len(answer) + 1):
            self._follow(answer, end)
        self._num_seen = max(self._num_seen, len(answer))
        if self.position is None:
            return ()
        return self.prediction[self.position :][: _TRUST + 2 * self._run]

    def _follow(self, answer: Sequence[int], end: int) -> None:
        """Take the answer's token before `end`."""
        if self.position is not None and self.prediction[self.position : self.position + 1] == (answer[end - 1],):
            self.position += 1
            self._run += 1
            return
        if self.position is not None:
            self._last = self.position
        ends = self._ends_of.get(tuple(answer[max(0, end - _MATCH) : end]), [])
        if ends:
            self.position, self._run = next((stop for stop in ends if stop >= self._last), ends[0]), _MATCH
        elif self._run >= _MATCH:
            # One token may have been replaced.
            self.position, self._run = self._last + 1, 0
        else:
            self.position, self._run = None, 0


class Copier:
    """The copied chains of one request."""

    def __init__(self, drafters: Sequence[str], num_prompt: int, prediction: Sequence[int]) -> None:
        self._num_prompt = num_prompt
        self._lookup = Lookup() if PROMPT_LOOKUP in drafters else None
        self._follower = Follower(prediction) if PREDICTION in drafters and prediction else None

    def __bool__(self) -> bool:
        return self._lookup is not None or self._follower is not None

    def copies(self, text: Sequence[int], most: int) -> tuple[Copy, ...]:
        """Chains of at most `most` tokens behind the text; none that begins another."""
        found: list[Copy] = []
        if self._follower is not None:
            found.append(Copy(PREDICTION, self._follower.chain(text[self._num_prompt :])[:most]))
        if self._lookup is not None:
            looked_up = self._lookup.chain(text)[:most]
            if not any(copy.tokens[: len(looked_up)] == looked_up for copy in found):
                found.append(Copy(PROMPT_LOOKUP, looked_up))
        return tuple(copy for copy in found if copy.tokens)

    def num_predicted(self, text: Sequence[int], emitted: Sequence[int]) -> int:
        """How many of the tokens emitted behind the text the prediction has foreseen."""
        if self._follower is None:
            return 0
        foreseen = self._follower
        foreseen.chain(text[self._num_prompt :])
        if foreseen.position is None:
            return 0
        count = 0
        for token, expected in zip(emitted, foreseen.prediction[foreseen.position :], strict=False):
            if token != expected:
                break
            count += 1
        return count
