"""Separates a model's thoughts, between two marks at its beginning, from its answer.

Most families do so, with different marks (`thought_marks.py`). If the chat template has opened the
thoughts, the answer has only the closing mark.

Not for: whether a model thinks, which its chat template decides (`thinking_switch.py`); answers of
several messages (`harmony.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from server.text.stops import num_held
from server.text.thought_marks import THINK, ThoughtMarks


@dataclass(frozen=True)
class Thought:
    """Text of a thought."""

    text: str


class CallHeader(str):
    """Marks before a call, for the reader of calls. No stop string is looked for in them."""


class CallEnd(Thought):
    """End of a message with calls, a thought without text. An open call ends, too."""


class ThoughtReader(Protocol):
    """Parser of the thoughts in one answer."""

    @property
    def is_inside(self) -> bool:
        """Whether the last text was a thought."""

    @property
    def holds_call(self) -> bool:
        """Whether the last text of the thoughts may be a call that ends them."""

    @property
    def has_called(self) -> bool:
        """Whether a call has ended the thoughts."""

    def feed(self, text: str, is_last: bool = False) -> list[str | Thought]:
        """Return the parts found in a piece of text; the last piece releases everything."""


class CallSearch(Protocol):
    """Search for a whole call in thoughts (`thought_calls.py`)."""

    held: str

    def feed(self, text: str, is_last: bool = False) -> tuple[str, str | None]:
        """Return the text that is a thought, and the text from a whole call on."""

    def close(self) -> str:
        """Return the held text, which is a thought."""

    def is_in_call(self, text: str) -> bool:
        """Return whether a call is open after further text of the answer."""


class _State(Enum):
    START = auto()
    """Only white space or a part of the opening tag has arrived."""
    INSIDE = auto()
    AFTER = auto()
    """The thoughts have ended, and only white space has followed."""
    CALLED = auto()
    """A call has ended the thoughts; their closing mark may follow."""
    OUTSIDE = auto()


class Reasoning:
    """Parser of one answer's text, in pieces of any size. White space next to a tag is dropped."""

    def __init__(self, starts_inside: bool, marks: ThoughtMarks = THINK, calls: CallSearch | None = None) -> None:
        """starts_inside: the prompt has opened the thoughts. calls: finds calls in them."""
        self._calls = calls
        self._open = marks.open.rstrip()
        self._close = marks.close
        self._state = _State.INSIDE if starts_inside else _State.START
        self._is_blank = True
        """Whether the thoughts have been white space so far."""
        self._held = ""
        self._blank = ""
        """White space at the end of the thoughts so far, if calls are looked for."""

    @property
    def is_inside(self) -> bool:
        """Whether the last text was a thought."""
        return self._state is _State.INSIDE

    @property
    def holds_call(self) -> bool:
        """Whether the last text of the thoughts may be a call that ends them."""
        return self.is_inside and self._calls is not None and bool(self._calls.held)

    @property
    def has_called(self) -> bool:
        """Whether a call has ended the thoughts."""
        return self._state is _State.CALLED

    def feed(self, text: str, is_last: bool = False) -> list[str | Thought]:
        """Return the parts found in a piece of text; the last piece releases everything."""
        self._held += text
        parts: list[str | Thought] = []
        while self._advance(parts):
            pass
        if is_last:
            parts += self._rest()
        return parts

    def _rest(self) -> list[str | Thought]:
        """Return the text that is held at the end of the answer."""
        rest = self._held
        self._held = ""
        if self._state is not _State.INSIDE:
            return [rest] if rest else []
        if self._calls is None:
            return self._thought(rest)
        thought, call = self._calls.feed(rest, is_last=True)
        thought = self._blank + thought
        return [*self._thought(thought if call is None else thought.rstrip()), *([call] if call else [])]

    def _advance(self, parts: list[str | Thought]) -> bool:
        """Release the text whose type is known. Returns whether more may follow."""
        before = self._state
        if self._state is _State.START:
            self._start()
        elif self._state is _State.INSIDE:
            self._think(parts)
        elif self._state is _State.CALLED:
            self._follow_call(parts)
        else:
            if self._state is _State.AFTER:
                self._held = self._held.lstrip()
            if self._held:
                parts.append(self._held)
                self._held = ""
                self._state = _State.OUTSIDE
        return self._state is not before

    def _start(self) -> None:
        start = self._held.lstrip()
        if start.startswith(self._open):
            self._state = _State.INSIDE
            self._held = start.removeprefix(self._open)
        elif start.startswith(self._close):
            # An empty thought without its opening mark.
            self._state = _State.AFTER
            self._held = start.removeprefix(self._close)
        elif start and not self._open.startswith(start) and not self._close.startswith(start):
            self._state = _State.OUTSIDE

    def _think(self, parts: list[str | Thought]) -> None:
        thought, tag, rest = self._held.partition(self._close)
        if not tag:
            end = len(self._held) - num_held(self._held, [self._close])
            thought = self._held[:end].rstrip() if self._calls is None else self._held[:end]
            rest = self._held[len(thought) :]
        call = None
        if self._calls is not None:
            thought, call = self._calls.feed(thought)
            if tag and call is None:
                thought += self._calls.close()
            thought = self._blank + thought
            self._blank = ""
        self._held = rest
        if call is not None:
            parts += [*self._thought(thought.rstrip()), call]
            self._state = _State.CALLED
            self._held = tag + rest
        elif tag:
            parts += self._thought(thought.rstrip())
            self._state = _State.AFTER
        else:
            sure = thought.rstrip()
            self._blank = thought[len(sure) :]
            parts += self._thought(sure)

    def _follow_call(self, parts: list[str | Thought]) -> None:
        """Release the text after a call that has ended the thoughts, without their closing mark."""
        assert self._calls is not None
        text, tag, rest = self._held.partition(self._close)
        if not tag:
            end = len(self._held) - num_held(self._held, [self._close])
            text = self._held[:end]
            rest = self._held[end:]
        is_in_call = self._calls.is_in_call(text)
        self._held = rest
        if tag and not is_in_call:
            self._state = _State.AFTER
        elif tag:
            self._calls.is_in_call(tag)
            text += tag
        if text:
            parts.append(text)
        if tag and is_in_call:
            self._follow_call(parts)

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

    @property
    def holds_call(self) -> bool:
        """Whether the last text of the thoughts may be a call that ends them."""
        return self._reader.holds_call

    @property
    def has_called(self) -> bool:
        """Whether a call has ended the thoughts."""
        return self._reader.has_called

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


def reasoning_of(starts_inside: bool, marks: ThoughtMarks, calls: CallSearch | None = None) -> ThoughtReader:
    """Return a parser of an answer with these marks.

    starts_inside: the prompt has opened the thoughts. calls: finds calls that end them.
    """
    reader = Reasoning(starts_inside, marks, calls)
    if not marks.wrapper[0]:
        return reader
    return WrappedReasoning(reader, marks.wrapper)


def is_open(prompt_end: str, marks: ThoughtMarks = THINK) -> bool:
    """Return whether a prompt with this end has opened the thoughts."""
    return prompt_end.rstrip().endswith(marks.open.rstrip())


def is_closed(prompt_end: str, marks: ThoughtMarks = THINK) -> bool:
    """Return whether a prompt with this end has begun the rest of the answer."""
    return prompt_end.rstrip().endswith(marks.lead or marks.close)
