"""Requests whose answers follow a grammar, from their arrival until they end.

They wait here until their grammar can be followed, which takes a process of its own some time; nobody waits for that.
Clients take turns: one that sends many costly grammars delays another client's by one of them, and its own by all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from engine.errors import GRAMMAR_UNAVAILABLE, RequestError
from engine.plan import Grammar
from engine.request import GRAMMAR, Request

# Reading a grammar may take a core for seconds; one call may ask for many.
_READ_AT_ONCE = 4
# A grammar that takes longer than its first slice begins again behind all others, and few such are read at once:
# costly grammars leave room for ordinary ones, which take milliseconds. New ones leave room for a costly one, too.
_FIRST_SLICE_S = 0.25
_SLOW_AT_ONCE, _SLOW_AMONG_OTHERS = 2, 1


class FollowedGrammar(Grammar, Protocol):
    """A grammar that is followed elsewhere, and may fail."""

    @property
    def failure(self) -> RequestError | None:
        """Why it cannot be followed any further."""

    def is_ready(self) -> bool:
        """Whether masks can be asked for; does not wait. Raises RequestError for one that cannot be followed."""

    def seconds_read(self) -> float:
        """CPU time that reading it has taken so far."""

    def check_answer(self, emitted: Sequence[int]) -> None:
        """Note what a step has emitted; `failure` says if the grammar does not allow it."""

    def end(self) -> None:
        """Stop following it, whatever it does."""


class GrammarSource(Protocol):
    """Starts grammars."""

    def start(self, grammar: str) -> FollowedGrammar:
        """Begin to follow a grammar."""


class FairQueue:
    """Waiting requests: the most urgent come first, and clients of one priority take turns."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, str], deque[Request]] = {}
        """Requests by priority and client; the client whose turn comes last is last."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: Request) -> None:
        """Append a request to its client's; a client without one gets the last turn."""
        self._waiting.setdefault((request.priority, request.client), deque()).append(request)

    @property
    def first(self) -> Request:
        """The next request; there must be one."""
        return self._waiting[self._turn()][0]

    def take(self) -> Request:
        """Remove and return the next request; its client's next turn comes after all others'."""
        turn = self._turn()
        own = self._waiting.pop(turn)
        request = own.popleft()
        if own:
            self._waiting[turn] = own
        return request

    def remove(self, request_id: str) -> bool:
        """Forget a request; whether it waited here."""
        for turn, own in self._waiting.items():
            for request in own:
                if request.request_id == request_id:
                    own.remove(request)
                    if not own:
                        del self._waiting[turn]
                    return True
        return False

    def _turn(self) -> tuple[int, str]:
        return min(self._waiting, key=lambda turn: turn[0])


class Following:
    """The grammars of all requests."""

    def __init__(
        self,
        source: GrammarSource,
        most: int,
        after_thoughts: Callable[[Request, FollowedGrammar], FollowedGrammar] = lambda _, grammar: grammar,
    ) -> None:
        """most: grammars that are followed at once; further requests wait for one to end, the most urgent first;
        after_thoughts: makes of a request's grammar one that holds after its thoughts."""
        self.source = source
        self._after_thoughts = after_thoughts
        self._most = most
        self._waiting = FairQueue()
        self._slow = FairQueue()
        """Requests whose grammars have used up their first slice."""
        self._starting: dict[str, tuple[Request, FollowedGrammar]] = {}
        self._starting_slow: set[str] = set()
        self._followed: dict[str, FollowedGrammar] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that do not run because their grammar is not ready."""
        return len(self._waiting) + len(self._slow) + len(self._starting)

    def add(self, request: Request) -> None:
        """Begin with a request's grammar as soon as there is room."""
        self._waiting.add(request)

    def ready(self) -> tuple[list[tuple[Request, FollowedGrammar]], list[tuple[str, RequestError]]]:
        """(requests that can run from now on, those that never will and why); does not wait."""
        ready: list[tuple[Request, FollowedGrammar]] = []
        failed: list[tuple[str, RequestError]] = []
        num_ready = -1
        while len(ready) > num_ready:  # whoever is ready makes room for another to begin
            num_ready = len(ready)
            self._begin(failed)
            self._collect(ready, failed)
        return ready, failed

    def _begin(self, failed: list[tuple[str, RequestError]]) -> None:
        """Start the grammars of waiting requests while there is room."""
        while (queue := self._next_queue()) and self._has_room:
            request = queue.first
            try:
                state = self.source.start(request.sampling.grammar)
            except OSError as error:  # no more processes or files: others will end
                if self._starting or self._followed:
                    break
                refusal = RequestError(f"no grammar can be followed ({error})", GRAMMAR, GRAMMAR_UNAVAILABLE)
                failed.append((request.request_id, refusal))
            else:
                self._starting[request.request_id] = request, self._after_thoughts(request, state)
                if queue is self._slow:
                    self._starting_slow.add(request.request_id)
            queue.take()

    def _next_queue(self) -> FairQueue:
        """Return the queue that the next grammar is taken from; it is empty if none is."""
        return self._slow if self._slow and self._slow_has_room else self._waiting

    def _collect(self, ready: list[tuple[Request, FollowedGrammar]], failed: list[tuple[str, RequestError]]) -> None:
        """Move started grammars to those that are ready, or have failed."""
        for request_id, (request, state) in list(self._starting.items()):
            try:
                if state.is_ready():
                    ready.append((request, state))
                    self._followed[request_id] = state
                    del self._starting[request_id]
                    self._starting_slow.discard(request_id)
                elif self._is_over(request_id, state):
                    if not self._slow and self._slow_has_room:
                        self._starting_slow.add(request_id)
                        continue
                    self.end(request_id)
                    self._slow.add(request)
            except RequestError as error:
                failed.append((request_id, error))
                self.end(request_id)

    def _is_over(self, request_id: str, state: FollowedGrammar) -> bool:
        """Whether a grammar's first slice is over and others wait for its place."""
        others_wait = bool(self._waiting or self._slow) and not self._has_room
        return others_wait and request_id not in self._starting_slow and state.seconds_read() > _FIRST_SLICE_S

    @property
    def _slow_has_room(self) -> bool:
        return len(self._starting_slow) < (_SLOW_AMONG_OTHERS if self._waiting else _SLOW_AT_ONCE)

    @property
    def _has_room(self) -> bool:
        return len(self._starting) < _READ_AT_ONCE and len(self._starting) + len(self._followed) < self._most

    def failed(self, emitted: Iterable[tuple[str, Sequence[int]]] = ()) -> list[tuple[str, RequestError]]:
        """Requests that run and whose grammar cannot be followed any further; they are forgotten.

        emitted: what a step has emitted of each request, which its grammar may turn out not to allow.
        """
        for request_id, tokens in emitted:
            if (state := self._followed.get(request_id)) is not None:
                state.check_answer(tokens)
        failed = [(name, state.failure) for name, state in self._followed.items() if state.failure is not None]
        for request_id, _ in failed:
            self.end(request_id)
        return failed

    def end(self, request_id: str) -> bool:
        """Forget a request that has ended, or will not begin; whether it had not begun yet."""
        is_new = self._waiting.remove(request_id) or self._slow.remove(request_id)
        _, state = self._starting.pop(request_id, (None, None))
        self._starting_slow.discard(request_id)
        is_new = is_new or state is not None
        if (state := state or self._followed.pop(request_id, None)) is not None:
            state.end()
        return is_new
