"""Chooses the reader that separates an answer's thoughts from its text."""

from __future__ import annotations

from collections.abc import Callable

from server.text.harmony import HarmonyMessages
from server.text.reasoning import CallSearch, ThoughtReader, reasoning_of
from server.text.tagged_messages import MESSAGE_FORMATS, TaggedMessages
from server.text.thought_marks import HARMONY, MARKS, ThoughtMarks


def part_reader(
    marks: ThoughtMarks, prompt_end: str, starts_inside: bool, search: Callable[[], CallSearch] | None = None
) -> ThoughtReader:
    """Return a new reader of one answer.

    prompt_end: last part of the prompt, which may have begun the answer. starts_inside: the prompt
    has opened thoughts that are not a message. search: makes a search for calls that end thoughts.
    """
    if marks == MARKS[HARMONY]:
        return HarmonyMessages(prompt_end)
    if message_format := next((name for name in MESSAGE_FORMATS if marks == MARKS[name]), None):
        return TaggedMessages(MESSAGE_FORMATS[message_format], prompt_end)
    return reasoning_of(starts_inside, marks, search and search())
