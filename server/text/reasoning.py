"""Separates a model's thoughts, between two marks at its beginning, from its answer.

Most families do so, with different marks (`thought_marks.py`). If the chat template has opened the
thoughts, the answer has only the closing mark.

Not for: whether a model thinks, which its chat template decides (`thinking_variables`); answers
of several messages (`harmony.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from server.text.stops import num_held
from server.text.thought_marks import THINK, ThoughtMarks
from server.wire.fields import Effort


@dataclass(frozen=True)
class Thought:
    """Text of a thought."""

    text: str


class CallHeader(str):
    """Marks before a call, for the reader of calls. No stop string is looked for in them."""


class ThoughtReader(Protocol):
    """Parser of the thoughts in one answer."""

    @property
    def is_inside(self) -> bool:
        """Whether the last text was a thought."""

    def feed(self, text: str, is_last: bool = False) -> list[str | Thought]:
        """Return the parts found in a piece of text; the last piece releases everything."""


class _State(Enum):
    START = auto()
    """Only white space or a part of the opening tag has arrived."""
    INSIDE = auto()
    AFTER = auto()
    """The thoughts have ended, and only white space has followed."""
    OUTSIDE = auto()


class Reasoning:
    """Parser of one answer's text, in pieces of any size. White space next to a tag is dropped."""

    def __init__(self, starts_inside: bool, marks: ThoughtMarks = THINK) -> None:
        """starts_inside: the prompt has opened the thoughts."""
        self._open = marks.open.rstrip()
        self._close = marks.close
        self._state = _State.INSIDE if starts_inside else _State.START
        self._is_blank = True
        """Whether the thoughts have been white space so far."""
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """Whether the last text was a thought."""
        return self._state is _State.INSIDE

    def feed(self, text: str, is_last: bool = False) -> list[str | Thought]:
        """Return the parts found in a piece of text; the last piece releases everything."""
        self._held += text
        parts: list[str | Thought] = []
        while self._advance(parts):
            pass
        if is_last and self._held:
            if self._state is _State.INSIDE:
                parts += self._thought(self._held)
            else:
                parts.append(self._held)
        return parts

    def _advance(self, parts: list[str | Thought]) -> bool:
        """Release text of a known type; return whether the state has changed."""
        before = self._state
        if self._state is _State.START:
            start = self._held.lstrip()
            if start.startswith(self._open):
                self._state = _State.INSIDE
                self._held = start.removeprefix(self._open)
            elif start and not self._open.startswith(start):
                self._state = _State.OUTSIDE
        elif self._state is _State.INSIDE:
            self._think(parts)
        else:
            if self._state is _State.AFTER:
                self._held = self._held.lstrip()
            if self._held:
                parts.append(self._held)
                self._held = ""
                self._state = _State.OUTSIDE
        return self._state is not before

    def _think(self, parts: list[str | Thought]) -> None:
        thought, tag, rest = self._held.partition(self._close)
        if tag:
            parts += self._thought(thought.rstrip())
            self._held = rest
            self._state = _State.AFTER
            return
        end = len(self._held) - num_held(self._held, [self._close])
        sure = self._held[:end].rstrip()
        parts += self._thought(sure)
        self._held = self._held[len(sure) :]

    def _thought(self, text: str) -> list[str | Thought]:
        if self._is_blank:
            text = text.lstrip()
        if not text:
            return []
        self._is_blank = False
        return [Thought(text)]


class WrappedReasoning:
    """Parser of an answer whose rest stands between two tags, which are dropped."""

    def __init__(self, reader: ThoughtReader, wrapper: tuple[str, str]) -> None:
        self._reader = reader
        self._open, self._close = wrapper
        self._is_begun = False
        """Whether the beginning of the rest has been read."""
        self._is_wrapped = False
        """Whether the rest begins with the opening tag."""
        self._is_blank = True
        """Whether only white space has followed the opening tag."""
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """Whether the last text was a thought."""
        return self._reader.is_inside

    def feed(self, text: str, is_last: bool = False) -> list[str | Thought]:
        """Return the parts found in a piece of text; the last piece releases everything."""
        parts: list[str | Thought] = []
        for part in self._reader.feed(text, is_last):
            if isinstance(part, Thought):
                parts.append(part)
            else:
                parts += self._unwrapped(part)
        if is_last and self._held:
            rest = self._held
            if self._is_wrapped and rest.rstrip().endswith(self._close):
                rest = rest.rstrip().removesuffix(self._close).rstrip()
            if rest:
                parts.append(rest)
        return parts

    def _unwrapped(self, text: str) -> list[str | Thought]:
        self._held += text
        if not self._is_begun:
            start = self._held.lstrip()
            if len(start) < len(self._open) and self._open.startswith(start):
                return []
            self._is_begun = True
            self._is_wrapped = start.startswith(self._open)
            if self._is_wrapped:
                self._held = start.removeprefix(self._open)
        if not self._is_wrapped:
            released = self._held
            self._held = ""
            return [released]
        return self._released()

    def _released(self) -> list[str | Thought]:
        """Release all text that is not white space or a closing tag at the end."""
        if self._is_blank:
            self._held = self._held.lstrip()
        end = len(self._held.rstrip())
        end -= num_held(self._held[:end], [self._close])
        if self._held[:end].endswith(self._close):
            end -= len(self._close)
        sure = self._held[:end].rstrip()
        self._held = self._held[len(sure) :]
        if not sure:
            return []
        self._is_blank = False
        return [sure]


def reasoning_of(starts_inside: bool, marks: ThoughtMarks) -> ThoughtReader:
    """Return a parser of an answer; starts_inside: the prompt has opened the thoughts."""
    reader = Reasoning(starts_inside, marks)
    if not marks.wrapper[0]:
        return reader
    return WrappedReasoning(reader, marks.wrapper)


def is_open(prompt_end: str, marks: ThoughtMarks = THINK) -> bool:
    """Return whether a prompt with this end has opened the thoughts."""
    return prompt_end.rstrip().endswith(marks.open.rstrip())


def is_closed(prompt_end: str, marks: ThoughtMarks = THINK) -> bool:
    """Return whether a prompt has begun the rest of the answer, after any thoughts."""
    return prompt_end.rstrip().endswith(marks.lead or marks.close)


def thinking_variables(effort: Effort | None, is_wanted: bool | None) -> dict[str, Any]:
    """Return the template's variables that switch thinking; none if not requested."""
    if is_wanted is None and effort is None:
        return {}
    is_on = effort != "none"
    if is_wanted is not None:
        is_on = is_wanted
    variables: dict[str, Any] = {"enable_thinking": is_on, "thinking": is_on}
    if effort:
        variables["reasoning_effort"] = effort
    return variables
