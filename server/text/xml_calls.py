"""Reads calls whose arguments stand between tags, as plain text.

For example, `glm`:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Others have attributes (`<invoke name="NAME">`), a tag around all calls, or nested tags.

A call is reported when it is complete. A value may contain tags: it ends only at a closing tag
before another parameter or before the call's end, and a whole call inside it is a part of it. Two
values are ambiguous: one that contains the end of a call without its beginning, and one that
contains the end of a parameter directly before the beginning of another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import regex

from server.text.argument_types import as_value, finite_number, is_value, part_of
from server.text.call_formats import MINIMAX, XmlFormat
from server.text.call_pieces import CallParts, Calls

_LONGEST_TAG = 512
"""Characters; a longer text without a complete tag is no tag."""
Parameters = Mapping[str, Mapping[str, Any]]
"""Schemas of the functions' arguments by name."""
IsValue = Callable[[str, str], bool]
"""Returns whether a text is a value of the argument with a name."""


class _Region:
    """Parser of one call, tag by tag."""

    def __init__(self, name: str, opening: str, quotes: bool, form: XmlFormat, is_value: IsValue | None = None) -> None:
        """quotes: whether values may contain whole calls.

        is_value: whether a text is an argument's value; None if any is.
        """
        self.body: list[str] = []
        """Text that stands instead of arguments."""
        self.are_strings: dict[str, bool] = {}
        """Whether the model has called an argument a string, by its name."""
        self._form = form
        self.name = name
        self.raw = [opening]
        self.is_complete = False
        self.values: dict[str, list[str]] = {}
        self._quotes = quotes
        self._is_value = is_value
        self._key = ""
        self._in_value = False
        self._since_end: list[str] | None = None
        """Text since a tag that may have ended the value of `_key`."""
        self._depth = 0
        """Number of quoted calls in the value that have not ended."""

    def text(self, text: str) -> bool:
        """Read the text between tags; return whether this may still be a call."""
        self.raw.append(text)
        if self._in_value or (text.strip() and self._back_to_value()):
            self.values[self._key].append(text)
            return True
        if self._since_end is not None:
            self._since_end.append(text)
        if self._form.body and not self.values:
            self.body.append(text)
            return True
        return not text.strip()

    def _back_to_value(self) -> bool:
        """Treat the tags since the last closing one as quoted. Returns whether there was one."""
        if self._since_end is None:
            return False
        self.values[self._key] += self._since_end
        self._in_value = True
        self._since_end = None
        return True

    def tag(self, kind: str, tag: str, key: str | None, is_string: str | None = None) -> bool:
        """Read a tag; return whether this may still be a call.

        kind: name of the tag's pattern in XmlFormat. key: name of the argument that the tag begins.
        is_string: what the tag says about its value.
        """
        if self._in_value:
            self._inside_value(kind, tag)
        elif key is not None and key not in self.values:
            self._in_value = True
            self._key = key
            self._since_end = None
            self.values[key] = []
            if is_string is not None:
                self.are_strings[key] = is_string in ("true", "string")
        elif kind == "closes" or (kind == "value_end" and self._form.ends_twice and self._since_end is not None):
            self.is_complete = True
        elif self._back_to_value():
            self._inside_value(kind, tag)
        else:
            return False
        self.raw.append(tag)
        return True

    def _inside_value(self, kind: str, tag: str) -> None:
        if kind == "value_end" and not self._depth and self._may_end():
            self._in_value = False
            self._since_end = [tag]
            return
        if kind == "opens" and self._quotes:
            self._depth += 1
        if kind == "closes":
            self._depth = max(0, self._depth - 1)
        self.values[self._key].append(tag)

    def _may_end(self) -> bool:
        """Return whether the open value may end here; JSON of a schema must be complete."""
        if self._is_value is None:
            return True
        return self._is_value(self._key, "".join(self.values[self._key]))


class XmlRegions:
    """Reader of calls between tags, and of the text outside them."""

    def __init__(
        self, calls: Calls, form: XmlFormat, parameters: Parameters, followed: frozenset[str] = frozenset()
    ) -> None:
        """followed: names of the functions whose calls a grammar forces to follow their schema."""
        self._calls = calls
        self._parameters = parameters
        self._form = form
        self._followed = followed
        self._opens = regex.compile(f"(?P<opens>{form.opens})")
        self._tags = regex.compile(
            f"(?P<opens>{form.opens})|(?P<parameter>{form.parameter})|(?P<value_end>{form.value_end})"
            f"|(?P<closes>{form.closes})"
        )
        self._region: _Region | None = None
        self._text = ""
        self._quotes = True

    @property
    def is_open(self) -> bool:
        return self._region is not None

    def feed(self, text: str, output: CallParts) -> None:
        self._text += text
        position = 0
        while (tag := self._pattern().search(self._text, position)) is not None:
            self._take(tag, self._text[position : tag.start()], output)
            position = tag.end()
        end = self._first_held(position)
        rest = self._text[position:end]
        self._text = self._text[end:]
        if self._region is None:
            output.say(rest)
        elif rest and not self._region.text(rest):
            self._give_back(output)

    def _pattern(self) -> regex.Pattern[str]:
        return self._opens if self._region is None else self._tags

    def _first_held(self, position: int) -> int:
        """Return the begin of the text that may become a tag, or the end of the text."""
        first = self._form.mark[0]
        place = self._text.find(first, max(position, len(self._text) - _LONGEST_TAG))
        while place >= 0:
            tag = self._pattern().match(self._text, place, partial=True)
            if tag is not None:
                return place
            place = self._text.find(first, place + 1)
        return len(self._text)

    def _take(self, tag: regex.Match[str], before: str, output: CallParts) -> None:
        groups = tag.groupdict()
        kind = next(name for name in ("opens", "parameter", "value_end", "closes") if groups.get(name))
        if self._region is None:
            output.say(before)
        elif self._region.text(before) and self._region.tag(kind, tag[0], tag["key"], groups.get("is_string")):
            if not self._region.is_complete:
                return
            arguments = self._arguments(self._region)
            if arguments is not None:
                self._calls.whole(self._region.name, json.dumps(arguments), output)
                self._region = None
                return
            self._give_back(output)
            return
        else:
            self._give_back(output)
        # Unreadable text may begin another call.
        if kind == "opens" and tag["function"] in self._parameters:
            name = tag["function"]
            is_value = None
            if name in self._followed:
                is_value = partial(self._is_value, self._parameters[name])
            self._region = _Region(name, tag[0], self._quotes, self._form, is_value)
        else:
            output.say(tag[0])

    def _arguments(self, region: _Region) -> dict[str, Any] | None:
        schema = self._parameters[region.name]
        body = "".join(region.body).strip()
        if region.values and body:
            return None
        if body:
            return nested_arguments(body, schema) if self._form.body == "nested" else _json_object(body)
        arguments = {}
        for key, pieces in region.values.items():
            text = self._without_padding("".join(pieces))
            is_string = region.are_strings.get(key)
            arguments[key] = text if is_string else as_value(text, key, schema if is_string is None else {})
        return arguments

    def _is_value(self, schema: Mapping[str, Any], key: str, text: str) -> bool:
        return is_value(self._without_padding(text), key, schema)

    def _without_padding(self, text: str) -> str:
        return text.removeprefix(self._form.padding).removesuffix(self._form.padding)

    def _give_back(self, output: CallParts) -> None:
        """Report the open call as text."""
        assert self._region is not None
        output.say("".join(self._region.raw))
        self._region = None

    def finish(self, output: CallParts) -> None:
        """Read the end of the answer, where a quoted beginning may have hidden a call's end."""
        if self._region is None:
            output.say(self._text)
            self._text = ""
            return
        text = "".join(self._region.raw) + self._text
        self._region = None
        self._text = ""
        if not self._quotes:
            output.say(text)
            return
        self._quotes = False
        self.feed(text, output)
        self.finish(output)


_JSON_TAG = regex.compile(r"<\|(?:open|close)\|>json[^<>]*<\|sep\|>")
"""Tags of Kimi K3 around arguments as one object."""


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(
            _JSON_TAG.sub("", text), strict=False, parse_constant=finite_number, parse_float=finite_number
        )
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_NESTED = regex.compile(rf"{regex.escape(MINIMAX)}<(?P<end>/?)(?P<name>[^<>\s/]{{1,200}})>")


def nested_arguments(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments in nested tags, typed by the schema; None if tags mismatch."""
    open_names: list[str] = []
    children: list[list[tuple[str, Any]]] = [[]]
    schemas: list[Mapping[str, Any]] = [schema]
    end = 0
    for tag in _NESTED.finditer(text):
        before = text[end : tag.start()]
        end = tag.end()
        if not tag["end"]:
            if before.strip():
                return None
            open_names.append(tag["name"])
            children.append([])
            schemas.append(part_of(schemas[-1], tag["name"], schema))
            continue
        if not open_names or open_names.pop() != tag["name"]:
            return None
        inner = children.pop()
        inner_schema = schemas.pop()
        if inner and before.strip():
            return None
        value = _joined(inner) if inner else as_value(before, "x", {**schema, "properties": {"x": inner_schema}})
        children[-1].append((tag["name"], value))
    if open_names or text[end:].strip():
        return None
    return dict(children[0])


def _joined(parts: list[tuple[str, Any]]) -> Any:
    """Return the list or the object of some nested values."""
    if all(name == "item" for name, _ in parts):
        return [value for _, value in parts]
    return dict(parts)
