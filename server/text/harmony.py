"""Reads answers in the harmony format of gpt-oss: messages in channels, each with a header.

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The channel `analysis` has thoughts, `final` and `commentary` have text. A message with a recipient
(`to=`, before or after the channel) is a call. It stays as it is, with its header, for the reader
of calls (`call_formats.py`). Source: docs/format.md of openai/harmony.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import regex

from server.text.reasoning import CallEnd, CallHeader, Thought
from server.text.stops import num_held

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = r"to=[^\s<]{1,99}"
_HEADER = regex.compile(
    r"\s{0,9}(?:<\|start\|>)?(?:assistant)?"
    rf"(?P<rest>(?:\s{{0,9}}(?P<first>{_RECIPIENT}))?\s{{0,9}}(?:<\|channel\|>(?P<channel>\w{{1,32}}))?"
    rf"(?:\s{{1,9}}(?P<second>{_RECIPIENT}))?\s{{0,9}}(?:<\|constrain\|>)?\s{{0,9}}\w{{0,32}}<\|message\|>)"
)
_SEPARATOR = "\n\n"


class _Kind(Enum):
    HEADER = auto()
    """No message is open."""
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyMessages:
    """Parser of one answer's text, in pieces of any size. Text without a header is text."""

    holds_call = False
    has_called = False

    def __init__(self, prompt_end: str) -> None:
        """prompt_end: last part of the prompt, with the header that it has opened."""
        self._held = ""
        """Text that is not released yet."""
        self._opened = ""
        """Part of a header that the prompt has before this text."""
        self._kind = _Kind.HEADER
        self._begins = False
        """Whether nothing of the open message has been released."""
        self._released: set[_Kind] = set()
        before, mark, header = prompt_end.rpartition(_START)
        if mark:
            self.feed(mark + header)
        elif before + header:
            self._kind = _Kind.TEXT
        self._released.clear()
        self._begins = False
        self._opened = self._held
        self._held = ""

    @property
    def is_inside(self) -> bool:
        """Whether the last text was a thought."""
        return self._kind is _Kind.THOUGHT

    def feed(self, text: str, is_last: bool = False) -> list[str | Thought]:
        """Return the parts found; the last piece releases all but an unfinished header."""
        self._held += text
        parts: list[str | Thought] = []
        while self._held and self._advance(parts):
            pass
        has_mark = _START in self._held or _CHANNEL in self._held
        is_unfinished_header = self._kind is _Kind.HEADER and has_mark
        if is_last and not is_unfinished_header:
            self._release(len(self._held), parts)
        return parts

    def _advance(self, parts: list[str | Thought]) -> bool:
        """Read a header or the text of a message. Returns whether more can be read."""
        if self._kind is _Kind.HEADER:
            return self._read_header(parts)
        end = _END.search(self._held)
        if end is None:
            self._release(len(self._held) - num_held(self._held, _ENDS), parts)
            return False
        self._release(end.start(), parts)
        if end[0] not in (_START, _CHANNEL):
            self._held = self._held[len(end[0]) :]
        if self._kind is _Kind.CALL:
            parts.append(CallEnd(""))
        self._kind = _Kind.HEADER
        return True

    def _read_header(self, parts: list[str | Thought]) -> bool:
        header = _HEADER.match(self._opened + self._held, partial=True)
        if header is not None and header.partial:
            return False
        length = len(self._opened)
        self._opened = ""
        if header is None:
            self._kind = _Kind.TEXT
            self._begins = False
            mark = next((mark for mark in (_START, _CHANNEL) if self._held.startswith(mark)), "")
            self._release(len(mark), parts)
            return True
        self._held = self._held[header.end() - length :]
        self._begins = True
        if header["first"] or header["second"]:
            self._kind = _Kind.CALL
            parts.append(CallHeader(header["rest"]))
        else:
            self._kind = _Kind.THOUGHT if header["channel"] == "analysis" else _Kind.TEXT
        return True

    def _release(self, length: int, parts: list[str | Thought]) -> None:
        """Release held text. An empty line separates messages of one kind."""
        text = self._held[:length]
        self._held = self._held[length:]
        if not text:
            return
        is_further = self._kind in self._released and self._kind is not _Kind.CALL
        if self._begins and is_further:
            text = _SEPARATOR + text
        self._begins = False
        self._released.add(self._kind)
        parts.append(Thought(text) if self._kind is _Kind.THOUGHT else text)
