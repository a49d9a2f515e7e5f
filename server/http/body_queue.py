"""Queue of bodies that wait to be read, as bytes; only a few are objects at a time.

A chat of a thousand messages is thousands of objects, and each full garbage collection visits all
of them. Hundreds of such bodies stopped the event loop for a quarter of a second at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack

from engine.api import EngineBusy
from server.text.lanes import LONG, size_of_chat

_MOST_WAITING = 1 << 24
"""Maximum number of characters that may wait in each queue."""
_LONG_AT_ONCE = 2
"""Long bodies that are objects: one is rendered, and another one is decoded meanwhile."""
_SHORT_AT_ONCE = 8
"""Short bodies that are objects; they use two threads."""


class BodyQueue:
    """Queue of bodies, first come, first served, with a bound on their size."""

    def __init__(self, at_once: int, most: int = _MOST_WAITING) -> None:
        """most: characters of all bodies together; a single body may be longer."""
        self.num_waiting = 0
        """Characters of bodies that wait, or whose prompts are not known yet."""
        self._most = most
        self._turns = asyncio.Semaphore(at_once)

    def enter(self, size: int, place: ExitStack) -> Awaitable[None]:
        """Join with `size` characters; return the wait for a turn. Closing `place` leaves.

        Raises EngineBusy if too much waits.
        """
        if self.num_waiting and self.num_waiting + size > self._most:
            raise EngineBusy(
                f"bodies of {self.num_waiting} characters wait to be read and this request adds {size}, the limit is "
                f"{self._most}; try again soon"
            )
        self.num_waiting += size
        place.callback(self._leave, size)
        return self._wait(place)

    async def _wait(self, place: ExitStack) -> None:
        await self._turns.acquire()
        place.callback(self._turns.release)

    def _leave(self, size: int) -> None:
        self.num_waiting -= size


class BodyQueues:
    """Separate queues for short and long bodies, so that short ones never wait for long ones."""

    def __init__(self) -> None:
        self.short = BodyQueue(_SHORT_AT_ONCE)
        self.long = BodyQueue(_LONG_AT_ONCE)

    def enter(self, body: bytes, place: ExitStack) -> Awaitable[None]:
        """Join the queue of a body's size; see `BodyQueue.enter`."""
        size = size_of_chat(len(body), body.count(b"{"))
        queue = self.long if size >= LONG else self.short
        return queue.enter(size, place)
