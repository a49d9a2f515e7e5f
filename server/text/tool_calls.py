"""Reads function calls from an answer incrementally: text outside them, names, and arguments.

In JSON formats a call is reported as soon as its name is known. A region that is not a call becomes
text.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import regex

from server.text.call_formats import JSON_FORMATS, LLAMA3_JSON, PYTHONIC, XML_FORMATS, last_mark
from server.text.call_pieces import Call, CallParts, Calls, Piece, Reader
from server.text.json_calls import JsonAnswer, JsonRegions
from server.text.literal_calls import LITERAL_FORMATS, LiteralRegions
from server.text.template_calls import TemplateRegions
from server.text.tools import ToolUse
from server.text.xml_calls import XmlRegions


def call_reader(calls: Calls, use: ToolUse, response_template: dict[str, Any] | None) -> Reader:
    """Return a new reader of the calls in an answer."""
    schemas = {tool.function.name: tool.function.parameters or {} for tool in use.tools}
    if use.format in (LLAMA3_JSON, PYTHONIC):
        return JsonAnswer(calls, LiteralRegions(calls, LITERAL_FORMATS[PYTHONIC], schemas))
    if use.format in LITERAL_FORMATS:
        return LiteralRegions(calls, LITERAL_FORMATS[use.format], schemas)
    if use.format in XML_FORMATS:
        return XmlRegions(calls, XML_FORMATS[use.format], schemas, use.followed)
    if use.format in JSON_FORMATS:
        return JsonRegions(calls, JSON_FORMATS[use.format])
    assert response_template is not None
    return TemplateRegions(calls, response_template, use.for_template())


class ToolCalls:
    """Reader of the calls and the text of one answer."""

    def __init__(self, use: ToolUse, response_template: dict[str, Any] | None) -> None:
        self._calls = Calls(use.names)
        self._most = None if use.parallel else 1
        self._held = ""
        """White space after a call, or a mark that may belong to it."""
        last = last_mark(use.format)
        if use.format in LITERAL_FORMATS:
            last = LITERAL_FORMATS[use.format].last
        self._last = regex.compile(rf"\s*(?:{last})") if last else None
        self._follows_call = False
        self._new_reader = partial(call_reader, self._calls, use, response_template)
        self._reader = self._new_reader()

    @property
    def calls(self) -> list[Call]:
        """Calls so far."""
        return self._calls.calls[: self._most]

    @property
    def are_complete(self) -> bool:
        """Whether there are calls and all are complete."""
        return bool(self.calls) and self._calls.num_ended >= len(self.calls)

    @property
    def is_over(self) -> bool:
        """Whether the only allowed call has ended, also as invalid JSON, which ends the answer."""
        return self._most is not None and self._calls.num_ended + self._calls.num_broken >= self._most

    def feed(self, text: str, is_last: bool) -> list[str | Piece]:
        """Return the text outside calls and the pieces of calls in a piece of the answer."""
        output = CallParts()
        self._reader.feed(text, output)
        if is_last:
            self._reader.finish(output)
        new = output.parts()
        if self.is_over:
            new = self._up_to_only_call(new)
        parts: list[str | Piece] = []
        for part in new:
            if isinstance(part, Piece):
                self._held = ""
                self._follows_call = True
                parts.append(part)
                continue
            said = self._held + part
            self._held = ""
            if self._follows_call:
                said = self._after_marks(said)
            if said:
                self._follows_call = False
                parts.append(said)
        if is_last and self._held.strip():
            parts.append(self._held)
        return parts

    def end_message(self) -> list[str | Piece]:
        """Return the rest of a message with calls. Later text belongs to none of its calls."""
        parts = self.feed("", is_last=True)
        self._held = ""
        self._calls.num_broken = len(self._calls.calls) - self._calls.num_ended
        self._reader = self._new_reader()
        return parts

    def _after_marks(self, text: str) -> str:
        """Return a text after a call without marks; hold white space and a part of a mark."""
        mark = self._last.match(text, partial=True) if self._last is not None else None
        if mark is not None and not mark.partial:
            return self._after_marks(text[mark.end() :])
        if mark is None and text.strip():
            return text
        self._held = text
        return ""

    def _up_to_only_call(self, parts: list[str | Piece]) -> list[str | Piece]:
        assert self._most is not None
        end = 0
        for number, part in enumerate(parts, start=1):
            if isinstance(part, Piece) and part.index < self._most:
                end = number
        return parts[:end]
