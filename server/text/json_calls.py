"""Reads calls with JSON arguments incrementally.

A call ends with its object; marks inside strings are text. A region that is not a call becomes text as a whole:
invalid JSON, an unknown name, a head that the format does not have. Reading continues right after it. If the JSON
becomes invalid after the name has been reported, the call contains the model's text up to the next end mark.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import regex

from server.text.call_formats import JsonFormat
from server.text.call_pieces import CallParts, Calls
from server.text.stops import num_held


class _JsonState(Enum):
    TEXT = auto()
    HEAD = auto()
    """In the text after a mark that begins a call."""
    OBJECT = auto()
    BROKEN = auto()
    """In a call that has been reported and has become invalid JSON."""
    BEHIND = auto()
    """In the text after a call's object."""


class JsonRegions:
    """Reader of calls between marks, and of the text outside them."""

    def __init__(self, calls: Calls, form: JsonFormat) -> None:
        self._calls, self._form = calls, form
        self._marks = sorted([*form.opens, *([form.last] if form.last else [])], key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, self._marks)))
        self._heads = {mark: regex.compile(head) for mark, head in form.opens.items()}
        self._behind = regex.compile(form.behind)
        self._at = _JsonState.TEXT
        self._mark = self._before = ""
        """Mark of the current call, and the text between it and the object."""
        self._text, self._position = "", 0
        self._follows_call = False
        """Whether only white space has followed the last call."""

    def feed(self, text: str, found: CallParts) -> None:
        self._text, self._position = self._text[self._position :] + text, 0
        steps = {
            _JsonState.TEXT: self._say,
            _JsonState.HEAD: self._read_head,
            _JsonState.OBJECT: self._read_object,
            _JsonState.BROKEN: self._read_broken,
            _JsonState.BEHIND: self._read_behind,
        }
        while self._position < len(self._text) and steps[self._at](found):
            pass

    def finish(self, found: CallParts) -> None:
        """Read the end of the answer. The beginning of a mark is text, unless the mark would end a complete call."""
        rest = self._text[self._position :]
        if self._at is _JsonState.TEXT:
            found.say(rest)
        elif self._at is _JsonState.HEAD:
            found.say(self._mark + rest)
        else:
            if self._at is _JsonState.BROKEN:
                self._calls.add(rest, found)
            self._calls.end(found, self._before)

    def _say(self, found: CallParts) -> bool:
        """Read text up to the next mark."""
        mark = self._find.search(self._text, self._position)
        end = len(self._text) - num_held(self._text, self._marks) if mark is None else mark.start()
        said = self._text[self._position : max(end, self._position)]
        self._follows_call = self._follows_call and not said.strip()
        found.say(said)
        if mark is None:
            self._position += len(said)
            return False
        self._position = mark.end()
        if mark[0] in self._heads:
            self._at, self._mark = _JsonState.HEAD, mark[0]
        elif not self._follows_call:
            found.say(mark[0])
        return True

    def _read_head(self, found: CallParts) -> bool:
        head = self._heads[self._mark].match(self._text, self._position, partial=True)
        if head is None:
            found.say(self._mark)
            self._at, self._follows_call = _JsonState.TEXT, False
        elif head.partial:
            return False
        else:
            self._begin(head, self._mark)
        return True

    def _begin(self, head: regex.Match[str], before: str) -> None:
        """Begin an object, at the last character of a head."""
        self._before, self._position = before + head[0][:-1], head.end() - 1
        self._calls.begin(head["name"] if self._form.is_named else None)
        self._at = _JsonState.OBJECT

    def _read_object(self, found: CallParts) -> bool:
        self._position = self._calls.feed(self._text, self._position, found)
        if self._calls.is_complete:
            if self._form.behind and self._calls.settle(found):
                self._at = _JsonState.BEHIND
            else:
                self._end(found)
        elif self._calls.is_broken:
            if self._calls.is_announced:
                self._at = _JsonState.BROKEN
            else:
                self._end(found)
        return True

    def _end(self, found: CallParts) -> None:
        self._calls.num_broken += self._at is _JsonState.BROKEN
        self._follows_call = self._calls.end(found, self._before)
        self._at = _JsonState.TEXT

    def _read_broken(self, found: CallParts) -> bool:
        close = self._form.close
        end = self._text.find(close, self._position) if close else -1
        if end < 0:
            end = max(len(self._text) - num_held(self._text, [close] if close else []), self._position)
            self._calls.add(self._text[self._position : end], found)
            self._position = end
            return False
        assert close is not None
        self._calls.add(self._text[self._position : end], found)
        self._position = end + len(close)
        self._end(found)
        return True

    def _read_behind(self, found: CallParts) -> bool:
        behind = self._behind.match(self._text, self._position, partial=True)
        if behind is not None and behind.partial:
            return False
        self._end(found)
        if behind is None:
            return True
        self._position = behind.end()
        if behind.groupdict().get("more"):
            self._begin(behind, "")
        return True


class JsonAnswer:
    """Reader of llama3_json: an answer that begins with { (or <|python_tag|>) contains calls separated by ;.

    Any other answer is text. From the first object on that is not a call, the rest is text.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._start: str | None = ""
        """Text before the type of the answer is known; None afterwards."""
        self._is_text = False
        self._between = ""
        """Text before an object; it is part of the answer if the object is not a call."""

    def feed(self, text: str, found: CallParts) -> None:
        position = 0
        if self._start is not None:
            text = self._start + text
            start = text.lstrip()
            if not start or (self._TAG.startswith(start) and start != self._TAG):
                self._start = text
                return
            self._start, position = None, len(text) - len(start)
            position += len(self._TAG) * start.startswith(self._TAG)
            self._between = text[:position]
        while position < len(text) and not self._is_text:
            if self._calls.is_open:
                position = self._in_call(text, position, found)
            elif text[position] == "{":
                self._calls.begin()
            elif text[position] in " \n\t;":
                self._between += text[position]
                position += 1
            else:
                self._is_text = True
                found.say(self._between)
        found.say(text[position:])

    def _in_call(self, text: str, position: int, found: CallParts) -> int:
        position = self._calls.feed(text, position, found)
        if self._calls.is_complete or self._calls.is_broken:
            self._is_text = not self._calls.end(found, self._between) or self._calls.num_ended < len(self._calls.calls)
            self._between = ""
        return position

    def finish(self, found: CallParts) -> None:
        if self._calls.is_open:
            self._calls.end(found, self._between)
        elif not self._is_text and not self._calls.calls:
            found.say(self._between)
        found.say(self._start or "")
