"""State of the calls of one answer. Not for: finding their begin and end (`*_calls.py`)."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from typing import Protocol

from server.text.argument_types import finite_number

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_LONGEST_HEAD = 1024
_STRING_END = re.compile(r'["\\\x00-\x1f]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r"[\s:,0-9+\-.eEtrufalsn]*")
"""Characters that JSON allows outside strings and brackets."""
_NUMBER = re.compile(r":\d+\Z")
_CLOSER = {"{": "}", "[": "]"}


@dataclass
class Call:
    """Function call; complete when the answer is."""

    name: str
    _pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """JSON text that the model has written so far."""
        return "".join(self._pieces)

    def add(self, arguments: str) -> None:
        """Next piece of the arguments."""
        self._pieces.append(arguments)


@dataclass(frozen=True)
class Piece:
    """Piece of a call; the first one has the name."""

    index: int
    name: str | None
    arguments: str


class CallParts:
    """Text and pieces of calls found in a piece of an answer, in order."""

    def __init__(self) -> None:
        self._parts: list[str | Piece] = []

    def say(self, text: str) -> None:
        """Add text outside calls."""
        if text:
            self._parts.append(text)

    def call(self, piece: Piece) -> None:
        """Add a piece of a call."""
        self._parts.append(piece)

    def parts(self) -> list[str | Piece]:
        """Return the parts, with adjacent texts joined."""
        result: list[str | Piece] = []
        for is_text, group in itertools.groupby(self._parts, lambda part: isinstance(part, str)):
            if is_text:
                result.append("".join(map(str, group)))
            else:
                result += group
        return result


class Reader(Protocol):
    """Reader of an answer's text, piece by piece."""

    @property
    def is_open(self) -> bool:
        """Whether the last text belongs to a call, or may."""

    def feed(self, text: str, output: CallParts) -> None:
        """Read a piece of text."""

    def finish(self, output: CallParts) -> None:
        """Read the end of the answer."""


class _Object:
    """Incremental parser of one call's JSON object; marks inside strings are text."""

    def __init__(self, name: str | None) -> None:
        """name: of the function, if the object has only its arguments."""
        self.pieces: list[str] = []
        self.name = name
        self.is_complete = False
        self.is_broken = False
        self._open: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._has_just_opened = False
        self._in_arguments = False
        self._depth_outside = 0 if name is not None else 1
        """Number of open brackets at the end of the arguments."""
        self._head = ""

    def feed(self, text: str, position: int, arguments: list[str]) -> int:
        """Read up to the object's end or invalid JSON; return the position after it.

        arguments: receives additions to the arguments once the name is known.
        """
        while position < len(text) and not self.is_complete and not self.is_broken:
            begin = position
            was_in_string = self._in_string
            was_in_arguments = self._in_arguments
            position = self._string(text, begin) if was_in_string else self._outside(text, begin)
            piece = text[begin:position]
            self.pieces.append(piece)
            if self.name is None and len(self._open) <= 2 and len(self._head) <= _LONGEST_HEAD:
                self._head += piece
            if was_in_string:
                piece = _CONTROL.sub(_escaped, piece)
            if was_in_arguments or self._in_arguments:
                arguments.append(piece)
        return position

    def _string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        end = _STRING_END.search(text, position)
        if end is None:
            return len(text)
        self._in_string = end[0] != '"'
        self._is_escaped = end[0] == "\\"
        return end.end()

    def _outside(self, text: str, position: int) -> int:
        """Read one bracket, the beginning of a string, or the text between them."""
        character = text[position]
        has_just_opened = self._has_just_opened
        self._has_just_opened = False
        if character == '"':
            self._in_string = True
        elif character in _CLOSER:
            self._opens(character)
        elif character in "}]":
            if _CLOSER[self._open.pop()] != character:
                self.is_broken = True
                return position
            self._in_arguments = self._in_arguments and len(self._open) > self._depth_outside
            self.is_complete = not self._open
        else:
            allowed = _SPACE if has_just_opened else _PLAIN
            match = allowed.match(text, position)
            assert match is not None
            self.is_broken = match.end() == position
            self._has_just_opened = has_just_opened
            return match.end()
        return position + 1

    def _opens(self, bracket: str) -> None:
        self._open.append(bracket)
        self._has_just_opened = bracket == "{"
        if self.name is not None:
            self._in_arguments = self._in_arguments or len(self._open) == 1
        elif bracket == "{" and len(self._open) == 2:
            head = _HEAD.fullmatch(self._head)
            if head is not None:
                self.name = _string(head[1])
                self._in_arguments = self.name is not None


def _escaped(control: re.Match[str]) -> str:
    """Return a control character as JSON escapes it; models write it unescaped."""
    return json.dumps(control[0])[1:-1]


def _string(raw: str) -> str | None:
    """Return a JSON string's value, or None if it is invalid."""
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def whole_call(raw: str) -> tuple[str, str] | None:
    """Return (name, arguments) of a call with its keys in any order; None if it is not a call."""
    try:
        value = json.loads(raw, strict=False, parse_constant=finite_number, parse_float=finite_number)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return value["name"], json.dumps(arguments)


class Calls:
    """Calls of one answer."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.calls: list[Call] = []
        self.num_ended = 0
        """Number of complete calls."""
        self.num_broken = 0
        """Number of calls with invalid JSON whose end was read."""
        self._object: _Object | None = None
        self._is_announced = False
        self._is_named = False
        self._waiting = ""
        """Arguments that are held back: a bracket alone does not prove that this is a call."""

    def name_in(self, call_id: str) -> str:
        """Return the function of an id such as `functions.NAME:0`; the id if it is not clear."""
        name = call_id.removeprefix("functions").removeprefix(".")
        readings = (name, _NUMBER.sub("", name), name.rstrip("0123456789"))
        if exact := next((reading for reading in readings if reading in self.names), None):
            return exact
        (*only,) = self.names
        is_number = call_id.removeprefix("call").strip("_:.").isdigit()
        return only[0] if is_number and len(only) == 1 else call_id

    def begin(self, name: str | None = None) -> None:
        """Begin a possible call's object; name: if the object has only its arguments."""
        self._object = _Object(name)
        self._is_announced = False
        self._is_named = name is not None
        self._waiting = ""

    def feed(self, text: str, position: int, output: CallParts) -> int:
        """Read more of the object and return the position after its part."""
        assert self._object is not None
        arguments: list[str] = []
        position = self._object.feed(text, position, arguments)
        if arguments and self._object.name in self.names:
            self._waiting += "".join(arguments)
            if self._is_announced or len(self._waiting.strip()) > 1:
                self.add("", output)
        return position

    def add(self, arguments: str, output: CallParts) -> None:
        """Add arguments to the open call, whose name is known."""
        assert self._object is not None
        arguments = self._waiting + arguments
        self._waiting = ""
        name = None
        if not self._is_announced:
            self._is_announced = True
            name = self._object.name or ""
            self.calls.append(Call(name))
        self.calls[-1].add(arguments)
        output.call(Piece(len(self.calls) - 1, name, arguments))

    def settle(self, output: CallParts) -> bool:
        """Report a complete object that was held back. Returns whether it is a call."""
        assert self._object is not None
        if self._is_announced or self._is_named:
            return self._is_announced
        call = whole_call("".join(self._object.pieces))
        if call is None or call[0] not in self.names:
            return False
        name, arguments = call
        self._object.name = name
        self.add(arguments, output)
        return True

    def end(self, output: CallParts, before: str = "") -> bool:
        """End the object. If it is no call, it becomes text, with the text before it."""
        assert self._object is not None
        is_complete = self._object.is_complete
        if is_complete:
            self.settle(output)
        if not self._is_announced:
            output.say(before)
            output.say("".join(self._object.pieces))
        self.num_ended += is_complete and self._is_announced
        self._object = None
        return self._is_announced

    def whole(self, name: str, arguments: str, output: CallParts) -> None:
        """Add a complete call."""
        self.calls.append(Call(name, [arguments]))
        self.num_ended += 1
        output.call(Piece(len(self.calls) - 1, name, arguments))

    @property
    def is_open(self) -> bool:
        """Whether a call is being written."""
        return self._object is not None

    @property
    def is_complete(self) -> bool:
        """Whether the open call's object has ended."""
        return self._object is not None and self._object.is_complete

    @property
    def is_broken(self) -> bool:
        """Whether the open call's object is invalid JSON."""
        return self._object is not None and self._object.is_broken

    @property
    def is_announced(self) -> bool:
        """Whether a part of the open call has been reported."""
        return self._object is not None and self._is_announced
