"""Reads calls with JSON arguments incrementally.

A call ends with its object; marks inside strings are text. A region that is not a call becomes text
as a whole: invalid JSON, an unknown name, a head that the format does not have. Reading continues
right after it. If the JSON becomes invalid after the name has been reported, the call contains the
model's text up to the next end mark.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import regex

from server.text.call_formats import JsonFormat
from server.text.call_pieces import CallParts, Calls, Reader
from server.text.stops import num_held


class _JsonState(Enum):
    TEXT = auto()
    HEAD = auto()
    """In the text after a mark that begins a call."""
    OBJECT = auto()
    BROKEN = auto()
    """In a call that has been reported and has become invalid JSON."""
    AFTER = auto()
    """In the text after a call's object."""


class JsonRegions:
    """Reader of calls between marks, and of the text outside them."""

    def __init__(self, calls: Calls, form: JsonFormat) -> None:
        self._calls = calls
        self._form = form
        self._marks = sorted(form.opens, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, self._marks)))
        self._heads = {mark: regex.compile(head) for mark, head in form.opens.items()}
        self._after = regex.compile(form.after)
        self._at = _JsonState.TEXT
        self._mark = ""
        self._before = ""
        """Text from the mark to the object."""
        self._text = ""
        self._position = 0

    @property
    def is_open(self) -> bool:
        return self._at in (_JsonState.OBJECT, _JsonState.BROKEN)

    def feed(self, text: str, output: CallParts) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0
        steps = {
            _JsonState.TEXT: self._say,
            _JsonState.HEAD: self._read_head,
            _JsonState.OBJECT: self._read_object,
            _JsonState.BROKEN: self._read_broken,
            _JsonState.AFTER: self._read_after,
        }
        while self._position < len(self._text) and steps[self._at](output):
            pass

    def finish(self, output: CallParts) -> None:
        """Read the end of the answer. The beginning of a mark is text outside of a call."""
        rest = self._text[self._position :]
        if self._at is _JsonState.TEXT:
            output.say(rest)
        elif self._at is _JsonState.HEAD:
            output.say(self._mark + rest)
        else:
            if self._at is _JsonState.BROKEN:
                self._calls.add(rest, output)
            self._calls.end(output, self._before)

    def _say(self, output: CallParts) -> bool:
        """Read text up to the next mark."""
        mark = self._find.search(self._text, self._position)
        end = mark.start() if mark else len(self._text) - num_held(self._text, self._marks)
        said = self._text[self._position : max(end, self._position)]
        output.say(said)
        if mark is None:
            self._position += len(said)
            return False
        self._position = mark.end()
        self._at = _JsonState.HEAD
        self._mark = mark[0]
        return True

    def _read_head(self, output: CallParts) -> bool:
        head = self._heads[self._mark].match(self._text, self._position, partial=True)
        if head is None:
            output.say(self._mark)
            self._at = _JsonState.TEXT
        elif head.partial:
            return False
        else:
            self._begin(head, self._mark)
        return True

    def _begin(self, head: regex.Match[str], before: str) -> None:
        self._before = before + head[0][:-1]
        self._position = head.end() - 1
        name = head["name"] if self._form.is_named else None
        self._calls.begin(self._calls.name_in(name) if name and self._form.has_ids else name)
        self._at = _JsonState.OBJECT

    def _read_object(self, output: CallParts) -> bool:
        self._position = self._calls.feed(self._text, self._position, output)
        if self._calls.is_complete:
            if self._form.after and self._calls.settle(output):
                self._at = _JsonState.AFTER
            else:
                self._end(output)
        elif self._calls.is_broken:
            if self._calls.is_announced:
                self._at = _JsonState.BROKEN
            else:
                self._end(output)
        return True

    def _end(self, output: CallParts) -> None:
        self._calls.num_broken += self._at is _JsonState.BROKEN
        self._calls.end(output, self._before)
        self._at = _JsonState.TEXT

    def _read_broken(self, output: CallParts) -> bool:
        close = self._form.close
        if not close:
            self._calls.add(self._text[self._position :], output)
            self._position = len(self._text)
            return False
        end = self._text.find(close, self._position)
        if end < 0:
            end = max(len(self._text) - num_held(self._text, [close]), self._position)
            self._calls.add(self._text[self._position : end], output)
            self._position = end
            return False
        self._calls.add(self._text[self._position : end], output)
        self._position = end + len(close)
        self._end(output)
        return True

    def _read_after(self, output: CallParts) -> bool:
        match = self._after.match(self._text, self._position, partial=True)
        if match is not None and match.partial:
            return False
        self._end(output)
        if match is None:
            return True
        self._position = match.end()
        if match.groupdict().get("more"):
            self._begin(match, "")
        return True


class JsonAnswer:
    """Reader of llama3_json: an answer of calls separated by ;, which begins with { or a tag.

    Any other answer may have calls in Python's syntax. After an object that is no call all is text.
    """

    _TAGS = ("<|python_tag|>", "<|python_start|>")
    _END = "<|python_end|>"

    def __init__(self, calls: Calls, otherwise: Reader) -> None:
        """otherwise: reads an answer without objects."""
        self._calls = calls
        self._otherwise: Reader | None = otherwise
        self._start: str | None = ""
        """Text before the type of the answer is known; None afterwards."""
        self._held = ""
        """Beginning of a tag after calls."""
        self._is_text = False
        self._between = ""
        """Text before an object; it is part of the answer if the object is not a call."""

    @property
    def is_open(self) -> bool:
        return self._calls.is_open or (self._otherwise is not None and self._otherwise.is_open)

    def feed(self, text: str, output: CallParts) -> None:
        position = 0
        if self._start is not None:
            text = self._start + text
            start = text.lstrip()
            tag = next((tag for tag in self._TAGS if start.startswith(tag)), "")
            rest = start.removeprefix(tag).lstrip()
            if not rest or (not tag and any(one.startswith(start) for one in self._TAGS)):
                self._start = text
                return
            self._start = None
            if rest.startswith("{"):
                self._otherwise = None
            position = len(text) - len(rest)
            self._between = text[:position]
        if self._otherwise is not None:
            self._otherwise.feed(text, output)
            return
        text = self._held + text
        self._held = ""
        while position < len(text) and not self._is_text:
            if self._calls.is_open:
                position = self._in_call(text, position, output)
            elif text[position] == "{":
                self._calls.begin()
            elif text.startswith(self._END, position):
                position += len(self._END)
            elif self._END.startswith(text[position:]):
                self._held = text[position:]
                return
            elif text[position] in " \n\t;":
                self._between += text[position]
                position += 1
            else:
                self._is_text = True
                output.say(self._between)
        output.say(text[position:])

    def _in_call(self, text: str, position: int, output: CallParts) -> int:
        position = self._calls.feed(text, position, output)
        if self._calls.is_complete or self._calls.is_broken:
            is_broken = self._calls.is_broken
            is_call = self._calls.end(output, self._between)
            self._calls.num_broken += is_call and is_broken
            are_complete = self._calls.num_ended == len(self._calls.calls)
            self._is_text = not is_call or not are_complete
            self._between = ""
        return position

    def finish(self, output: CallParts) -> None:
        if self._otherwise is not None:
            self._otherwise.feed(self._start or "", output)
            self._otherwise.finish(output)
            return
        if self._calls.is_open:
            self._calls.end(output, self._between)
        elif not self._is_text and not self._calls.calls:
            output.say(self._between)
        output.say((self._start or "") + self._held)
