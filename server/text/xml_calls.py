"""Reads calls of `qwen3_coder`: parameters between tags, their values as plain text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A call is reported when it is complete. A value may contain tags: it ends only at a closing tag before another parameter
or before the function's end, and a whole call inside it is a part of it. Two values are ambiguous: one that contains
the end of a call without its beginning, and one that contains the end of a parameter directly before the beginning of
another one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from server.text.argument_types import as_value
from server.text.call_pieces import CallParts, Calls
from server.text.stops import num_held

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(
    r"<tool_call>|</tool_call>|</function>|</parameter>|<(?:function|parameter)=(?P<name>[^<>\n]{1,200})>"
)
_FIRST = re.compile(re.escape(_OPEN))
_BEGINNINGS = (_OPEN, _CLOSE, "</function>", "</parameter>", "<function=", "<parameter=")
_LONGEST_TAG = 212


class _XmlState(Enum):
    FUNCTION = auto()
    """In the text after the first tag."""
    PARAMETERS = auto()
    """Between parameters."""
    VALUE = auto()
    END = auto()
    """In the text after the function's end."""


class _Region:
    """Parser of one call, tag by tag."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]], quotes: bool) -> None:
        """parameters: schemas of the functions' arguments by name. quotes: whether values may contain whole calls."""
        self._parameters, self._quotes = parameters, quotes
        self.raw: list[str] = []
        self.name = ""
        self.is_complete = False
        self._at = _XmlState.FUNCTION
        self._key = ""
        self._values: dict[str, list[str]] = {}
        self._since_end: list[str] | None = None
        """Text since a tag that may have ended the value of `_key`."""
        self._depth = 0
        """Number of quoted calls in the value that have not ended."""
        self._last = ""
        """The last tag, if only white space has followed."""

    def text(self, text: str) -> bool:
        """Read the text between tags; return whether this may still be a call."""
        self.raw.append(text)
        if text.strip():
            self._last = ""
        if self._at is _XmlState.VALUE or (text.strip() and self._back_to_value()):
            self._values[self._key].append(text)
            return True
        if self._since_end is not None:
            self._since_end.append(text)
        return not text.strip()

    def _back_to_value(self) -> bool:
        """Treat the tags since the last closing one as quoted. Returns whether there was one."""
        if self._since_end is None:
            return False
        self._values[self._key] += self._since_end
        self._at, self._since_end = _XmlState.VALUE, None
        return True

    def tag(self, tag: re.Match[str]) -> bool:
        """Read a tag; return whether this may still be a call."""
        if not self._tag(tag[0], tag["name"]):
            if not self._back_to_value():
                return False
            self._in_value(tag[0])
        self.raw.append(tag[0])
        self._last = tag[0]
        return True

    def _tag(self, tag: str, name: str | None) -> bool:
        if self._at is _XmlState.VALUE:
            self._in_value(tag)
            return True
        if self._at is _XmlState.FUNCTION:
            self._at, self.name = _XmlState.PARAMETERS, name or ""
            return tag.startswith("<function=") and self.name in self._parameters
        if self._at is _XmlState.END:
            self.is_complete = tag == _CLOSE
            return self.is_complete
        if tag.startswith("<parameter=") and name not in self._values:
            self._at, self._key, self._since_end = _XmlState.VALUE, name or "", None
            self._values[self._key] = []
            return True
        if tag != "</function>":
            return False
        self._at = _XmlState.END
        if self._since_end is not None:
            self._since_end.append(tag)
        return True

    def _in_value(self, tag: str) -> None:
        if tag == "</parameter>" and not self._depth:
            self._at, self._since_end = _XmlState.PARAMETERS, [tag]
            return
        if self._quotes and tag.startswith("<function=") and self._last == _OPEN:
            self._depth += 1
        if tag == _CLOSE and self._last == "</function>":
            self._depth = max(0, self._depth - 1)
        self._values[self._key].append(tag)

    def arguments(self) -> str:
        """Return the arguments as JSON."""
        texts = {key: "".join(pieces) for key, pieces in self._values.items()}
        schema = self._parameters[self.name]
        values = {key: as_value(text.removeprefix("\n").removesuffix("\n"), key, schema) for key, text in texts.items()}
        return json.dumps(values)


class XmlRegions:
    """Reader of calls between tags, and of the text outside them."""

    def __init__(self, calls: Calls, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        """parameters: schemas of the functions' arguments by name."""
        self._calls, self._parameters = calls, parameters
        self._region: _Region | None = None
        self._text = ""
        self._quotes = True

    def feed(self, text: str, found: CallParts) -> None:
        self._text += text
        position = 0
        while (tag := self._next(position)) is not None:
            if self._region is None:
                found.say(self._text[position : tag.start()])
                self._begin(tag[0])
            else:
                self._take(tag, self._text[position : tag.start()], found)
            position = tag.end()
        end = max(position, len(self._text) - self._held())
        rest, self._text = self._text[position:end], self._text[end:]
        if self._region is None:
            found.say(rest)
        elif rest and not self._region.text(rest):
            self._give_back(found)

    def _next(self, position: int) -> re.Match[str] | None:
        """Return the next tag that may matter."""
        return (_FIRST if self._region is None else _TAG).search(self._text, position)

    def _held(self) -> int:
        """Return the number of last characters that may begin a tag."""
        if self._region is None:
            return num_held(self._text, [_OPEN])
        begin = self._text.rfind("<", max(0, len(self._text) - _LONGEST_TAG))
        tail = self._text[begin:] if begin >= 0 else ""
        is_open = (
            ">" not in tail
            and "\n" not in tail
            and any(tail.startswith(one) or one.startswith(tail) for one in _BEGINNINGS)
        )
        return len(tail) if tail and is_open else 0

    def _begin(self, tag: str) -> None:
        self._region = _Region(self._parameters, self._quotes)
        self._region.raw.append(tag)

    def _take(self, tag: re.Match[str], before: str, found: CallParts) -> None:
        """Read text and a tag of the open call."""
        region = self._region
        assert region is not None
        if (before and not region.text(before)) or not region.tag(tag):
            self._give_back(found)
            # Unreadable text may begin another call.
            if tag[0] == _OPEN:
                self._begin(tag[0])
            else:
                found.say(tag[0])
        elif region.is_complete:
            self._calls.whole(region.name, region.arguments(), found)
            self._region = None

    def _give_back(self, found: CallParts) -> None:
        """Report the open call as text."""
        assert self._region is not None
        found.say("".join(self._region.raw))
        self._region = None

    def finish(self, found: CallParts) -> None:
        """Read the end of the answer. A quoted beginning of a call without its end may have hidden the end of the open
        call.
        """
        if self._region is None:
            found.say(self._text)
            self._text = ""
            return
        text = "".join(self._region.raw) + self._text
        self._region, self._text = None, ""
        if not self._quotes:
            found.say(text)
            return
        self._quotes = False
        self.feed(text, found)
        self.finish(found)
