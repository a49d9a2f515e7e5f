"""Earlier answers: an answer may repeat an earlier answer, as when code is edited.

Only requests that use this drafter take part, each within its client and `cache_salt`. The speed of
an answer may show that it resembles an earlier answer, so no request has this drafter by default.

An answer that was drawn with a request's own seed is not used for it. Its tokens come from the same
random numbers that decide about the drafts, so accepted drafts would be biased. The tokens of
another seed are independent of these numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from engine.config import EARLIER_ANSWERS
from engine.request import Request
from engine.scheduling.text_drafters.candidate import Candidate
from engine.scheduling.text_drafters.index import TextIndex

_MOST_TOKENS = 1 << 14
_MOST_CLIENTS = 32
"""Most clients; their answers take at most 100 MB together."""
_SEPARATOR = -1


class ClientAnswers:
    """Latest answers to one client."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Answers, each followed by a separator."""
        self._starts: list[int] = []
        self._seeds: list[int] = []
        self._index = TextIndex()

    def add(self, answer: Sequence[int], seed: int) -> None:
        """Store an answer, and forget the earliest answers if there are too many tokens."""
        if len(self.tokens) + len(answer) >= _MOST_TOKENS:
            self._forget(_MOST_TOKENS // 2)
        self._starts.append(len(self.tokens))
        self._seeds.append(seed)
        self.tokens += [*answer[-_MOST_TOKENS // 2 :], _SEPARATOR]
        self._index.read(self.tokens)

    def _forget(self, most_stored: int) -> None:
        """Forget the earliest answers, so that at most this many tokens are stored."""
        first = bisect_left(self._starts, len(self.tokens) - most_stored)
        begin = self._starts[first] if first < len(self._starts) else len(self.tokens)
        self._seeds = self._seeds[first:]
        self._starts = [start - begin for start in self._starts[first:]]
        self.tokens = self.tokens[begin:]
        self._index = TextIndex()
        self._index.read(self.tokens)

    def _stop(self, number: int) -> int:
        """Return the index of the separator after an answer."""
        is_last = number + 1 == len(self._starts)
        return (len(self.tokens) if is_last else self._starts[number + 1]) - 1

    def candidates(self, text: Sequence[int], seed: int | None) -> list[Candidate]:
        """Return the places after which the text may go on, without answers drawn with `seed`."""
        candidates = []
        for place, count in self._index.ends_in(self.tokens, text).items():
            number = bisect_right(self._starts, place - 1) - 1
            stop = self._stop(number)
            if self._seeds[number] != seed and place < stop:
                candidates.append(Candidate(EARLIER_ANSWERS, self.tokens, place, stop, count))
        return candidates


class AnswerStore:
    """Answers of the latest clients."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[str, str], ClientAnswers] = OrderedDict()

    def of(self, request: Request) -> ClientAnswers:
        """Return the answers that a request may see."""
        key = (request.client, request.cache_salt)
        answers = self._clients.setdefault(key, ClientAnswers())
        self._clients.move_to_end(key)
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        return answers

    def add(self, request: Request, answer: Sequence[int]) -> None:
        """Store the answer of a request that uses this drafter."""
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
