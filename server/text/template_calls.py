"""Reads calls described by a tokenizer's response template, with transformers' parser."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from server.text.call_pieces import CallParts, Calls, whole_call

_QUOTED = re.compile(r"[^\w\s\"\\]")


class TemplateRegions:
    """Reader of calls in the regions that the parser finds, and of the text outside them."""

    def __init__(self, calls: Calls, template: dict[str, Any], tools: Sequence[dict[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._calls = calls
        self._parser = ResponseParser(template, prefix="", tools=list(tools))
        self._fields = load_response_template(template).fields
        self._field = self._fields["tool_calls"]
        self._raw: list[str] = []
        """Characters that have not been reported as text or as a call."""
        self._seen: list[str] = []
        """The same characters as the parser sees them."""
        self._num_fed = 0
        self._in_region = False
        self._in_string = False
        self._is_escaped = False
        self._is_over = False
        """Whether the parser has failed; the rest is text."""

    @property
    def is_open(self) -> bool:
        return self._in_region

    def feed(self, text: str, output: CallParts) -> None:
        """Read text by character: if the parser fails, the position is known."""
        for number, character in enumerate(text):
            if self._is_over:
                output.say(text[number:])
                return
            self._raw.append(character)
            self._seen.append(self._shown(character))
            if not self._in_string:
                self._take(lambda: self._parser.feed(self._not_fed()), output)

    def finish(self, output: CallParts) -> None:
        if not self._is_over:
            self._take(lambda: self._parser.feed(self._not_fed()) + self._parser.finalize()[1], output)

    def _not_fed(self) -> str:
        """Return the parser's next characters; a JSON string at once, for linear time."""
        seen = "".join(self._seen[self._num_fed :])
        self._num_fed = len(self._seen)
        return seen

    def _shown(self, character: str) -> str:
        """Return a character for the parser; in JSON strings its marks are escaped."""
        if not self._in_region or self._field.content != "json":
            return character
        if not self._in_string:
            self._in_string = character == '"'
            return character
        if self._is_escaped:
            self._is_escaped = False
            return character
        self._in_string = character != '"'
        self._is_escaped = character == "\\"
        if ord(character) > 127:
            return json.dumps(character)[1:-1]
        return _QUOTED.sub(_spelled, character)

    def _take(self, step: Callable[[], list[dict[str, Any]]], output: CallParts) -> None:
        try:
            for event in step():
                self._event(event, output)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._is_over = True
            output.say("".join(self._raw))

    def _event(self, event: dict[str, Any], output: CallParts) -> None:
        kind = event["type"]
        region = event["field"]
        if region == "content" and kind == "region_chunk":
            self._give(len(event["text"]), output)
        elif region == "tool_calls" and kind == "region_open":
            self._in_region = True
            self._in_string = False
            self._is_escaped = False
        elif region == "tool_calls" and kind == "region_close":
            self._in_region = False
            self._close(event["value"], output)
        elif region != "content" and kind == "region_close":
            # This reader ignores other fields.
            length, _ = self._region(self._fields[region])
            self._give(length, output)

    def _close(self, value: Any, output: CallParts) -> None:
        values = value if isinstance(value, list) else [value]
        calls = [whole_call(json.dumps(call.get("function", call))) for call in values]
        length, is_closed = self._region(self._field)
        # Truncated arguments that are not JSON would look like fewer arguments.
        is_cut = not is_closed and self._field.content != "json"
        if is_cut or any(call is None or call[0] not in self._calls.names for call in calls):
            self._give(length, output)
            return
        self._give(length, CallParts())
        for call in calls:
            assert call is not None
            self._calls.whole(*call, output)

    def _give(self, length: int, output: CallParts) -> None:
        """Report the first unreported characters as text."""
        output.say("".join(self._raw[:length]))
        del self._raw[:length], self._seen[:length]
        self._num_fed -= length

    def _region(self, field: Any) -> tuple[int, bool]:
        """Return the length of the region that has just ended, and whether a mark has ended it."""
        seen = "".join(self._seen)
        begin = field.open_re and field.open_re.search(seen)
        end = begin and field.close_re and field.close_re.search(seen, begin.end())
        if not end:
            return len(self._raw), False
        ends = itertools.accumulate(map(len, self._seen))
        last = next(number for number, size in enumerate(ends) if size >= end.end())
        return last + 1, True


def _spelled(mark: re.Match[str]) -> str:
    return f"\\u{ord(mark[0]):04x}"
