"""Threads for work on texts. Short texts never wait for long texts.

Not for: the amount of text that waits, which is bounded before bodies are decoded
(`http/body_queue.py`).
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

LONG = 1 << 16
"""Characters from which a text counts as long: some milliseconds of work."""
_CHARACTERS_PER_OBJECT = 128
"""Characters that take about as long as a message or a tool."""


def size_of_chat(num_characters: int, num_objects: int) -> int:
    """Return the size of a chat, as a number of characters of text."""
    return num_characters + _CHARACTERS_PER_OBJECT * num_objects


class Lanes:
    """Two threads for short texts, one for long texts, and one for large answers."""

    def __init__(self) -> None:
        self.short = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self.long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        self.answers = ThreadPoolExecutor(1, thread_name_prefix="answers")

    def of(self, size: int) -> Executor:
        """Return the lane of texts of `size` characters."""
        return self.long if size >= LONG else self.short

    def close(self) -> None:
        """End all threads."""
        for lane in (self.short, self.long, self.answers):
            lane.shutdown(wait=False, cancel_futures=True)
