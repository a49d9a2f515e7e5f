"""Requests whose answers follow a grammar, from their arrival until they end.

They wait here until their grammar can be followed, which takes a process of its own some time; nobody waits for that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.errors import RequestError
from engine.plan import Grammar
from engine.request import GRAMMAR, Request

# Reading a grammar may take a core for seconds; one call may ask for many.
_READ_AT_ONCE = 4
# A grammar that takes longer than its first slice begins again behind all others, and few such are read at once: one
# client's costly grammars leave room for everybody's ordinary ones, which take milliseconds.
_FIRST_SLICE_S = 0.25
_SLOW_AT_ONCE = 2


class FollowedGrammar(Grammar, Protocol):
    """A grammar that is followed elsewhere, and may fail."""

    failure: RequestError | None
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


class Following:
    """The grammars of all requests."""

    def __init__(self, source: GrammarSource, most: int) -> None:
        """most: grammars that are followed at once; further requests wait for one to end, the most urgent first."""
        self.source = source
        self._most = most
        self._waiting: list[Request] = []
        self._slow: list[Request] = []
        """Requests whose grammars have used up their first slice, in turn."""
        self._starting: dict[str, tuple[Request, FollowedGrammar]] = {}
        self._starting_slow: set[str] = set()
        self._followed: dict[str, FollowedGrammar] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that do not run because their grammar is not ready."""
        return len(self._waiting) + len(self._slow) + len(self._starting)

    def add(self, request: Request) -> None:
        """Begin with a request's grammar as soon as there is room."""
        insort(self._waiting, request, key=lambda one: one.priority)

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
            request = queue[0]
            try:
                state = self.source.start(request.sampling.grammar)
            except OSError as error:  # no more processes or files: others will end
                if self._starting or self._followed:
                    break
                failed.append((request.request_id, RequestError(f"no grammar can be followed ({error})", GRAMMAR)))
            else:
                self._starting[request.request_id] = request, state
                if queue is self._slow:
                    self._starting_slow.add(request.request_id)
            queue.pop(0)

    def _next_queue(self) -> list[Request]:
        """Return the queue that the next grammar is taken from; it is empty if none is."""
        return self._slow if not self._waiting and len(self._starting_slow) < _SLOW_AT_ONCE else self._waiting

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
                    self.end(request_id)
                    self._slow.append(request)
            except RequestError as error:
                failed.append((request_id, error))
                self.end(request_id)

    def _is_over(self, request_id: str, state: FollowedGrammar) -> bool:
        """Whether a grammar's first slice is over and others wait for its place."""
        others_wait = bool(self._waiting or self._slow) and not self._has_room
        return others_wait and request_id not in self._starting_slow and state.seconds_read() > _FIRST_SLICE_S

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
        is_new = False
        for queue in (self._waiting, self._slow):
            if found := [one for one in queue if one.request_id == request_id]:
                queue.remove(found[0])
                is_new = True
        _, state = self._starting.pop(request_id, (None, None))
        self._starting_slow.discard(request_id)
        is_new = is_new or state is not None
        if (state := state or self._followed.pop(request_id, None)) is not None:
            state.end()
        return is_new
