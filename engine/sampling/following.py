"""Requests whose answers follow a grammar, from their arrival until they end.

They wait here until their grammar can be followed, which takes a process of its own some time; nobody waits for that.
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol

from engine.errors import RequestError
from engine.plan import Grammar
from engine.request import GRAMMAR, Request

# Reading a grammar may take a core for seconds; one call may ask for many.
_READ_AT_ONCE = 4


class FollowedGrammar(Grammar, Protocol):
    """A grammar that is followed elsewhere, and may fail."""

    failure: RequestError | None
    """Why it cannot be followed any further."""

    def is_ready(self) -> bool:
        """Whether masks can be asked for; does not wait. Raises RequestError for one that cannot be followed."""

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
        self._starting: dict[str, tuple[Request, FollowedGrammar]] = {}
        self._followed: dict[str, FollowedGrammar] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that do not run because their grammar is not ready."""
        return len(self._waiting) + len(self._starting)

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
        while self._waiting and self._has_room:
            request = self._waiting[0]
            try:
                state = self.source.start(request.sampling.grammar)
            except OSError as error:  # no more processes or files: others will end
                if self._starting or self._followed:
                    break
                failed.append((request.request_id, RequestError(f"no grammar can be followed ({error})", GRAMMAR)))
            else:
                self._starting[request.request_id] = request, state
            self._waiting.pop(0)

    def _collect(self, ready: list[tuple[Request, FollowedGrammar]], failed: list[tuple[str, RequestError]]) -> None:
        """Move started grammars to those that are ready, or have failed."""
        for request_id, (request, state) in list(self._starting.items()):
            try:
                if state.is_ready():
                    ready.append((request, state))
                    self._followed[request_id] = state
                    del self._starting[request_id]
            except RequestError as error:
                failed.append((request_id, error))
                self.end(request_id)

    @property
    def _has_room(self) -> bool:
        return len(self._starting) < _READ_AT_ONCE and len(self._starting) + len(self._followed) < self._most

    def failed(self) -> list[tuple[str, RequestError]]:
        """Requests that run and whose grammar cannot be followed any further; they are forgotten."""
        failed = [(name, state.failure) for name, state in self._followed.items() if state.failure is not None]
        for request_id, _ in failed:
            self.end(request_id)
        return failed

    def end(self, request_id: str) -> bool:
        """Forget a request that has ended, or will not begin; whether it had not begun yet."""
        waiting = [one for one in self._waiting if one.request_id != request_id]
        is_new = len(waiting) < len(self._waiting)
        self._waiting = waiting
        _, state = self._starting.pop(request_id, (None, None))
        is_new = is_new or state is not None
        if (state := state or self._followed.pop(request_id, None)) is not None:
            state.end()
        return is_new
