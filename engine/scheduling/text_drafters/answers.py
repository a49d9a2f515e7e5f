"""Earlier answers: an answer may repeat an earlier one, as when code is edited or a form is filled in.

Only requests that use this drafter take part, each within its client and `cache_salt`. How fast an answer comes may
show that it resembles an earlier one, so nobody has it by default.

An answer that was drawn with a request's own seed is not used for it. Its tokens come from the very random numbers that
decide about the drafts, so accepted ones would be biased; those of another seed are independent of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from engine.config import EARLIER_ANSWERS
from engine.request import Request
from engine.scheduling.text_drafters.candidate import Candidate
from engine.scheduling.text_drafters.index import TextIndex

_MOST_TOKENS, _MOST_CLIENTS = 1 << 14, 32
"""Tokens that are kept of a client, and clients: together at most 100 MB."""
_SEPARATOR = -1


class ClientAnswers:
    """Latest answers to one client."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Answers one after the other, each followed by a separator."""
        self._starts: list[int] = []
        self._seeds: list[int] = []
        """First place of each answer, and the seed that it was drawn with."""
        self._index = TextIndex()

    def add(self, answer: Sequence[int], seed: int) -> None:
        """Keep an answer, and forget the earliest ones if there are too many tokens."""
        if len(self.tokens) + len(answer) >= _MOST_TOKENS:
            self._forget(_MOST_TOKENS // 2)
        self._starts.append(len(self.tokens))
        self._seeds.append(seed)
        self.tokens += [*answer[-_MOST_TOKENS // 2 :], _SEPARATOR]
        self._index.read(self.tokens)

    def _forget(self, most_kept: int) -> None:
        """Keep whole answers of at most this many tokens."""
        first = next((n for n, start in enumerate(self._starts) if len(self.tokens) - start <= most_kept), None)
        begin = len(self.tokens) if first is None else self._starts[first]
        self._seeds = [] if first is None else self._seeds[first:]
        self._starts = [] if first is None else [start - begin for start in self._starts[first:]]
        self.tokens = self.tokens[begin:]
        self._index = TextIndex()
        self._index.read(self.tokens)

    def candidates(self, text: Sequence[int], seed: int | None) -> list[Candidate]:
        """Return the places of earlier answers after which the text may go on; seed: of answers to leave out."""
        found = []
        for place, count in self._index.ends_in(self.tokens, text).items():
            number = bisect_right(self._starts, place - 1) - 1
            stop = self._starts[number + 1] - 1 if number + 1 < len(self._starts) else len(self.tokens) - 1
            if self._seeds[number] != seed and place < stop:
                found.append(Candidate(EARLIER_ANSWERS, self.tokens, place, stop, count))
        return found


class AnswerStore:
    """Answers of the latest clients."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[str, str], ClientAnswers] = OrderedDict()

    def of(self, request: Request) -> ClientAnswers:
        """Return the answers that a request may see."""
        key = request.client, request.cache_salt
        found = self._clients.setdefault(key, ClientAnswers())
        self._clients.move_to_end(key)
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        return found

    def add(self, request: Request, answer: Sequence[int]) -> None:
        """Keep the answer of a request that uses this drafter."""
        if EARLIER_ANSWERS in request.speculation.drafters and answer:
            self.of(request).add(answer, request.sampling.seed)


class AnswersDrafter:
    """Finds the last tokens of a text in the earlier answers to its client."""

    def __init__(self, request: Request, answers: ClientAnswers) -> None:
        self._answers = answers
        self._seed = None if request.sampling.is_greedy else request.sampling.seed

    def candidates(self, text: Sequence[int]) -> list[Candidate]:
        """Return the places of earlier answers after which the text may go on."""
        return self._answers.candidates(text, self._seed)
