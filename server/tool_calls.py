"""Reads function calls out of an answer as it comes: text outside them, names, and arguments piece by piece.

A call is announced as soon as its name is known, and its arguments are passed on as the model writes them. What only
looked like a call (no JSON, an unknown name) is given back as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.call_formats import HERMES_TEMPLATE, TEMPLATES
from server.tools import HERMES, LLAMA3_JSON, ToolUse

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')


@dataclass
class Call:
    """One function call, complete when the answer is."""

    name: str
    arguments: str = ""


@dataclass(frozen=True)
class Piece:
    """More of a call; its name comes with the first piece."""

    index: int
    name: str | None
    arguments: str


class Found:
    """What a piece of an answer gave: text and pieces of calls, in their order."""

    def __init__(self) -> None:
        self.parts: list[str | Piece] = []

    def say(self, text: str) -> None:
        """Text outside calls."""
        if self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += text
        elif text:
            self.parts.append(text)


class _Body:
    """The JSON of one call while it is written."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.is_complete = False
        """Whether its object has ended."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._in_arguments = False

    def feed(self, text: str) -> str:
        """More of the call; what it adds to the arguments once the name is known."""
        arguments = ""
        for character in text:
            opens = self._follow(character)
            if opens and self._depth == 2 and self.name is None and (head := _HEAD.fullmatch(self.raw)):
                self.name = _string(head[1])
                self._in_arguments = self.name is not None
            self.raw += character
            if self._in_arguments:
                arguments += character
                self._in_arguments = self._depth > 1
        return arguments

    def _follow(self, character: str) -> bool:
        """Keep count of nesting; whether an object or list opens here."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
            return True
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0
        return False


def _string(raw: str) -> str | None:
    """A JSON string's value; None where it is none after all."""
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _whole(raw: str) -> tuple[str, str] | None:
    """(name, arguments) of a call in any order of keys; None where it is none."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], json.dumps(arguments)


class Reader(Protocol):
    """Takes an answer's text in pieces."""

    def feed(self, text: str, found: Found) -> None:
        """More text."""

    def finish(self, found: Found) -> None:
        """The answer has ended."""


class _Calls:
    """The calls of one answer."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.calls: list[Call] = []
        self.num_ended = 0
        """Calls that the model has ended, which the end of the answer did not."""
        self._body: _Body | None = None
        self._announced = False

    def begin(self) -> None:
        """A call may begin here."""
        self._body, self._announced = _Body(), False

    def more(self, text: str, found: Found) -> None:
        """More of it."""
        assert self._body is not None
        arguments = self._body.feed(text)
        if self._body.name in self.names and arguments:
            self._send(self._body.name or "", arguments, found)

    def _send(self, name: str, arguments: str, found: Found) -> None:
        first = not self._announced
        if first:
            self.calls.append(Call(name))
            self._announced = True
        self.calls[-1].arguments += arguments
        found.parts.append(Piece(len(self.calls) - 1, name if first else None, arguments))

    def end(self, found: Found, before: str = "", after: str = "", is_cut: bool = False) -> bool:
        """The call has ended; what is none goes back to the text, with what stood around it. Whether it was one.

        is_cut: the end of the answer has ended it.
        """
        body, self._body = self._body, None
        if body is None:
            return False
        whole = None if self._announced else _whole(body.raw)
        if whole is not None and whole[0] in self.names:
            self._send(*whole, found)
        if not self._announced:
            found.say(before + body.raw + after)
            return False
        self.num_ended += not is_cut
        return True

    @property
    def is_open(self) -> bool:
        """Whether a call is being written."""
        return self._body is not None

    @property
    def is_complete(self) -> bool:
        """Whether the object of the open call has ended."""
        return self._body is not None and self._body.is_complete


class RegionReader:
    """Calls in regions that transformers' ResponseParser finds: hermes, or a tokenizer's own response template."""

    def __init__(self, calls: _Calls, template: dict[str, Any], tools: Sequence[dict[str, Any]], is_raw: bool) -> None:
        """is_raw: a region holds one call as JSON, which is read as it comes."""
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._calls = calls
        self._parser = ResponseParser(template, prefix="", tools=list(tools))
        self._marks = load_response_template(template).fields.get("tool_calls")
        self._is_raw = is_raw
        self._raw = ""
        self._is_broken = False
        self._close = "</tool_call>"

    def feed(self, text: str, found: Found) -> None:
        """More text."""
        # A template's own parser may fail: character by character it is known what it has read before.
        for piece in [text] if self._is_raw else text:
            self._take(lambda piece=piece: self._parser.feed(piece), piece, found)  # type: ignore[misc]

    def finish(self, found: Found) -> None:
        """The answer has ended."""
        self._close = ""  # what closes now was not closed by the model
        self._take(lambda: self._parser.finalize()[1], "", found)

    def _take(self, step: Callable[[], list[dict[str, Any]]], text: str, found: Found) -> None:
        if self._is_broken:
            found.say(text)
            return
        self._raw += text
        try:
            for event in step():
                self._event(event, found)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # The template's own parser cannot read a region: what has not been given yet is text.
            self._is_broken = True
            found.say(self._raw)

    def _event(self, event: dict[str, Any], found: Found) -> None:
        kind, region = event["type"], event["field"]
        if region == "content":
            if kind == "region_chunk":
                found.say(event["text"])
                self._raw = self._raw[len(event["text"]) :]
        elif region != "tool_calls":
            return
        elif self._is_raw:
            if kind == "region_open":
                self._calls.begin()
            elif kind == "region_chunk":
                self._calls.more(event["text"], found)
            else:
                self._calls.end(found, "<tool_call>", self._close, is_cut=not self._close)
        elif kind == "region_close":
            values = event["value"] if isinstance(event["value"], list) else [event["value"]]
            calls = [json.dumps(value.get("function", value)) for value in values]
            length, is_closed = self._region()
            raw, self._raw = self._raw[:length], self._raw[length:]
            # Cut in the middle, arguments that are no JSON look like fewer of them.
            is_cut = not is_closed and self._marks.content != "json"
            if is_cut or any((whole := _whole(call)) is None or whole[0] not in self._calls.names for call in calls):
                found.say(raw)
                return
            for call in calls:
                self._calls.begin()
                self._calls.more(call, found)
                self._calls.end(found)

    def _region(self) -> tuple[int, bool]:
        """(characters of the region that has just ended, whether a mark has ended it): the parser has read further."""
        begin = self._marks.open_re.search(self._raw)
        end = begin and self._marks.close_re and self._marks.close_re.search(self._raw, begin.end())
        return (end.end(), True) if end else (len(self._raw), False)


class JsonReader:
    """llama3_json: an answer that begins with { (or <|python_tag|>) is calls with ; between them, any other is text.

    From the first object that is no call on, an answer is text.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._start: str | None = ""
        """What came before it is known what the answer is; None from then on."""
        self._is_text = False
        self._between = ""
        """What stands before an object: text, if the object is no call."""

    def feed(self, text: str, found: Found) -> None:
        """More text."""
        if self._start is not None:
            self._start += text
            start = self._start.lstrip()
            if not start or (self._TAG.startswith(start) and start != self._TAG):
                return
            self._between = self._start[: len(self._start) - len(start)]
            text, self._start = start.removeprefix(self._TAG), None
        for character in text:
            if self._is_text:
                found.say(character)
            elif self._calls.is_open or character == "{":
                self._in_call(character, found)
            elif character in " \n\t;":
                self._between += character
            else:
                self._is_text = True
                found.say(self._between + character)

    def _in_call(self, character: str, found: Found) -> None:
        if not self._calls.is_open:
            self._calls.begin()
        self._calls.more(character, found)
        if self._calls.is_complete:
            self._is_text = not self._calls.end(found, self._between)
            self._between = ""

    def finish(self, found: Found) -> None:
        """The answer has ended."""
        self._calls.end(found, self._between, is_cut=True)
        found.say(self._start or "")


class ToolCalls:
    """The calls and the text of one answer."""

    def __init__(self, use: ToolUse, response_template: dict[str, Any] | None) -> None:
        self._calls = _Calls(use.names)
        self._most = None if use.parallel else 1
        self._held = ""
        """White space behind a call: only text makes it text."""
        self._is_behind_call = False
        self._reader: Reader
        if use.format == LLAMA3_JSON:
            self._reader = JsonReader(self._calls)
        else:
            is_raw = use.format == HERMES
            template = HERMES_TEMPLATE if is_raw else TEMPLATES.get(use.format, response_template)
            assert template is not None
            self._reader = RegionReader(self._calls, template, use.for_template(), is_raw)

    @property
    def calls(self) -> list[Call]:
        """The calls so far."""
        return self._calls.calls[: self._most]

    @property
    def is_over(self) -> bool:
        """Whether the one call that is allowed has been made: the answer ends with it."""
        return self._most is not None and self._calls.num_ended >= self._most

    def feed(self, text: str, is_last: bool) -> list[str | Piece]:
        """What more text of the answer gives: text outside calls, and pieces of calls."""
        found = Found()
        self._reader.feed(text, found)
        if is_last:
            self._reader.finish(found)
        if self.is_over:
            # Whatever stands behind the last piece of the one call.
            is_last_call = [isinstance(part, Piece) and part.index < (self._most or 0) for part in found.parts]
            del found.parts[max((n + 1 for n, is_of_call in enumerate(is_last_call) if is_of_call), default=0) :]
        parts: list[str | Piece] = []
        for part in found.parts:
            if isinstance(part, Piece):
                self._held, self._is_behind_call = "", True
                parts.append(part)
                continue
            part, self._held = self._held + part, ""
            if self._is_behind_call and not part.strip():
                self._held = part
            else:
                self._is_behind_call = False
                parts.append(part)
        return parts
