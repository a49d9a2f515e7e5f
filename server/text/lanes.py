"""Threads for work on texts. Short texts never wait for long ones, and the amount of waiting text is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager

from engine.api import EngineBusy

LONG = 1 << 16
"""Characters from which a text counts as long: some milliseconds of work."""
_CHARACTERS_PER_OBJECT = 512
"""Characters that take as long to render as a message or a tool."""


class Lane:
    """Thread pool with a bound on its unfinished text."""

    def __init__(self, name: str, num_threads: int, most: int) -> None:
        """most: characters of all texts together; a single text may be longer."""
        self.executor: Executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self.num_waiting = 0
        """Characters of texts that wait or are in progress."""
        self._most = most

    @contextmanager
    def room(self, size: int) -> Iterator[Executor]:
        """Reserve the pool for a text of `size` characters; raises EngineBusy if too much text waits."""
        if self.num_waiting and self.num_waiting + size > self._most:
            raise EngineBusy(
                f"{self.num_waiting} characters of text wait to be tokenized and this request adds {size}, the limit "
                f"is {self._most}; try again soon"
            )
        self.num_waiting += size
        try:
            yield self.executor
        finally:
            self.num_waiting -= size

    def close(self) -> None:
        """End the threads."""
        self.executor.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """Two threads for short texts, one for long texts, and one for large answers, which are never refused."""

    def __init__(self, most: int) -> None:
        """most: characters that may wait in each lane."""
        self.short = Lane("tokenizer", 2, most)
        self.long = Lane("tokenizer-long", 1, most)
        self.answers = ThreadPoolExecutor(1, thread_name_prefix="answers")

    def of(self, size: int, num_objects: int = 0) -> Lane:
        """Return the lane of texts of `size` characters in a number of messages, tools and documents."""
        return self.long if size + _CHARACTERS_PER_OBJECT * num_objects >= LONG else self.short

    def close(self) -> None:
        """End all threads."""
        self.short.close()
        self.long.close()
        self.answers.shutdown(wait=False, cancel_futures=True)
