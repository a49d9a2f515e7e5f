"""Requests whose answers follow a grammar, from their arrival until they end.

Requests wait here until a separate process has read their grammar; the engine does not wait for it.
Clients take turns: a client that sends many costly grammars delays another client by a single
grammar, and its own requests by all.
"""

from __future__ import annotations

from collections import deque

from engine.errors import GRAMMAR_UNAVAILABLE, RequestError
from engine.grammar.grammar import GrammarClient, GrammarPool
from engine.request import GRAMMAR, Request

# Reading a grammar may occupy a core for seconds, and one call may need many grammars.
_READ_AT_ONCE = 4
# A grammar that takes longer than its first slice starts again after all waiting grammars, and few
# such slow grammars are read at once: they leave room for ordinary grammars, which take
# milliseconds. New grammars leave room for a slow grammar, too.
_FIRST_SLICE_S = 0.25
_SLOW_AT_ONCE = 2
_SLOW_AMONG_OTHERS = 1

Ready = list[tuple[Request, GrammarClient]]
Failed = list[tuple[str, RequestError]]


class FairQueue:
    """Waiting requests: the most urgent first, and clients of one priority take turns."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, str], deque[Request]] = {}
        """Requests by priority and client, in the order of the clients' turns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: Request) -> None:
        """Append a request to its client's queue; a new client gets the last turn."""
        self._waiting.setdefault((request.priority, request.client), deque()).append(request)

    @property
    def first(self) -> Request:
        """Return the next request; the queue must not be empty."""
        return self._waiting[self._turn()][0]

    def take(self) -> Request:
        """Remove and return the next request; its client gets the last turn."""
        turn = self._turn()
        requests = self._waiting.pop(turn)
        request = requests.popleft()
        if requests:
            self._waiting[turn] = requests
        return request

    def remove(self, request_id: str) -> bool:
        """Remove a request; return whether it was here."""
        for turn, requests in self._waiting.items():
            for request in requests:
                if request.request_id == request_id:
                    requests.remove(request)
                    if not requests:
                        del self._waiting[turn]
                    return True
        return False

    def _turn(self) -> tuple[int, str]:
        return min(self._waiting, key=lambda turn: turn[0])


class GrammarQueue:
    """Grammars of all requests: waiting, being read (`_starting`), or followed."""

    def __init__(self, source: GrammarPool, most: int) -> None:
        """most: grammars followed at once; further requests wait, the most urgent first."""
        self.source = source
        self._most = most
        self._waiting = FairQueue()
        self._slow = FairQueue()
        """Requests whose grammars exceeded their first slice."""
        self._starting: dict[str, tuple[Request, GrammarClient]] = {}
        self._starting_slow: set[str] = set()
        self._followed: dict[str, GrammarClient] = {}

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that do not run because their grammar is not ready."""
        return len(self._waiting) + len(self._slow) + len(self._starting)

    def add(self, request: Request) -> None:
        """Start a request's grammar as soon as there is room."""
        self._waiting.add(request)

    def ready(self) -> tuple[Ready, Failed]:
        """Return (requests that can run, requests that failed and why) without waiting."""
        ready: Ready = []
        failed: Failed = []
        num_ready = -1
        while len(ready) > num_ready:  # a ready grammar makes room for another one
            num_ready = len(ready)
            self._begin(failed)
            self._collect(ready, failed)
        return ready, failed

    def _begin(self, failed: Failed) -> None:
        """Start the grammars of waiting requests while there is room."""
        while (queue := self._next_queue()) and self._has_room:
            request = queue.first
            try:
                state = self.source.start(request.sampling.grammar)
            except OSError as error:  # no more processes or files: wait until others end
                if self._starting or self._followed:
                    break
                message = f"no grammar can be followed ({error})"
                refusal = RequestError(message, GRAMMAR, GRAMMAR_UNAVAILABLE)
                failed.append((request.request_id, refusal))
            else:
                self._starting[request.request_id] = request, state
                if queue is self._slow:
                    self._starting_slow.add(request.request_id)
            queue.take()

    def _next_queue(self) -> FairQueue:
        """Return the queue of the next grammar; it is empty if none can start."""
        if self._slow and self._slow_has_room:
            return self._slow
        return self._waiting

    def _collect(self, ready: Ready, failed: Failed) -> None:
        """Move started grammars to the ready or the failed requests."""
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

    def _is_over(self, request_id: str, state: GrammarClient) -> bool:
        """Whether a grammar's first slice is over and other grammars wait for its place."""
        if request_id in self._starting_slow or self._has_room:
            return False
        if not self._waiting and not self._slow:
            return False
        return state.seconds_read() > _FIRST_SLICE_S

    @property
    def _slow_has_room(self) -> bool:
        most = _SLOW_AMONG_OTHERS if self._waiting else _SLOW_AT_ONCE
        return len(self._starting_slow) < most

    @property
    def _has_room(self) -> bool:
        num_starting = len(self._starting)
        return num_starting < _READ_AT_ONCE and num_starting + len(self._followed) < self._most

    def failed(self) -> Failed:
        """Return running requests whose grammar cannot be followed any further."""
        failures = [(name, state.failure) for name, state in self._followed.items()]
        return [(name, failure) for name, failure in failures if failure is not None]

    def end(self, request_id: str) -> bool:
        """Remove a request that has ended or will not start; return whether it had not started."""
        is_waiting = self._waiting.remove(request_id) or self._slow.remove(request_id)
        _, starting = self._starting.pop(request_id, (None, None))
        self._starting_slow.discard(request_id)
        state = starting or self._followed.pop(request_id, None)
        if state is not None:
            state.end()
        return is_waiting or starting is not None
