"""Grammars of a call's arguments between tags, as plain text, by their JSON schema (`XmlFormat`).

A string is written as it is, any other value as JSON. A string never contains the tag that ends it
or the mark that begins calls, so that the reader (`xml_calls.py`) reads it back as it is. The
reader types a text by the schema (`argument_types.py`), so the grammar allows a text only if the
value that it becomes follows the schema.

Not for: the rest of a call (`call_grammars.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.api import RequestError
from server.text.argument_types import as_value
from server.text.schemas import compact
from server.text.structured import lark_literal
from server.text.text_values import Alternatives, CannotSplit, Schema, alternatives, merged, with_root


@dataclass(frozen=True)
class XmlSyntax:
    """Text around an argument's value."""

    begin: str
    """Right side of a rule for the text before a value; KEY stands for the argument's name."""
    end: str
    """Tag that ends a value."""
    padding: str
    """Text at both ends of a value that is not a part of it; the first one is in `begin`."""
    after: str
    """Right side of a rule for the text after an argument."""
    mark: str = "<tool_call>"
    """Text that no string contains, because it begins a call."""


XML_SYNTAXES: Mapping[str, XmlSyntax] = {
    "qwen3_coder": XmlSyntax(r'"<parameter=" KEY ">\n"', "</parameter>", "\n", r'"\n"'),
    "glm": XmlSyntax(r'"<arg_key>" KEY "</arg_key>" "\n"? "<arg_value>"', "</arg_value>", "", r'"\n"?'),
}
_KEY = r"[^<>\n]{1,200}"
_ROOT_KEYS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_BEGINS_AS_JSON = r"~/\s*[-0-9\[{](?s:.*)/"


class XmlArguments:
    """Rules of one function's arguments."""

    def __init__(
        self, syntax: XmlSyntax, with_marks: Callable[[str], str], end_token: str, function: str, number: int
    ) -> None:
        """with_marks: replaces marks in rules. end_token: special token that ends a value, or "".

        In Lark; "" if it is text. number: of the function, for names of rules.
        """
        self._syntax = syntax
        self._with_marks = with_marks
        self._end_token = end_token
        self._function = function
        self._number = number
        self._rules: list[str] = []

    def unrestricted(self) -> list[str]:
        """Return the rules for arguments with any names and values."""
        argument = self._argument(lark_literal(_KEY), self._text(f"TEXT_{self._number}", ["(?s:.*)"]))
        return [f"args_{self._number}: ({argument})*", *self._rules]

    def following(self, schema: Schema) -> list[str]:
        """Return the rules for arguments that follow a schema; raise RequestError."""
        properties, required = self._properties(schema)
        arguments = []
        for place, (key, key_schema) in enumerate(properties.items()):
            name = f"{self._number}_{place}"
            value = self._value(name, key, key_schema, schema)
            self._rules.append(f"arg_{name}: {self._argument(json.dumps(key), value)}")
            arguments.append(f"arg_{name}" if key in required else f"arg_{name}?")
        every = " ".join(arguments) or '""'
        return [f"args_{self._number}: {every}", *self._rules]

    def _properties(self, schema: Schema) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return (properties, names of required ones); raise RequestError."""
        try:
            root = merged(schema, schema)
        except CannotSplit as error:
            raise self._refusal("", str(error)) from error
        properties = root.get("properties") or {}
        required = root.get("required") or []
        if odd := next((key for key in root if key not in _ROOT_KEYS), None):
            raise self._refusal("", f"{odd!r} of their schema")
        if unlisted := next((key for key in required if key not in properties), None):
            raise self._refusal("", f"{unlisted!r}, which is required and is not a property")
        if odd := next((key for key in properties if not re.fullmatch(_KEY, key)), None):
            raise self._refusal("", f"the name {odd!r}")
        if not properties and root.get("additionalProperties", True) is not False:
            raise self._refusal("", "properties without names")
        return properties, required

    def _argument(self, key: str, value: str) -> str:
        begin = self._with_marks(self._syntax.begin).replace("KEY", key)
        return f"{begin} {value} {self._syntax.after}"

    def _value(self, name: str, key: str, schema: Any, root: Schema) -> str:
        """Return a rule for a value with the tag that ends it; raise RequestError."""
        try:
            values = alternatives(schema, root)
        except CannotSplit as error:
            raise self._refusal(key, str(error)) from error
        excluded = (_BEGINS_AS_JSON,) if values.are_bounded else ()
        strings = [*values.strings, *self._choices(values, key, root)]
        sides = [self._text(f"TEXT_{name}_{place}", patterns, excluded) for place, patterns in enumerate(strings)]
        if values.others:
            sides.append(self._json(name, values.others, root))
        if not sides:
            raise self._refusal(key, "any of its values")
        return f"({' | '.join(sides)})"

    def _json(self, name: str, schemas: Sequence[Schema], root: Schema) -> str:
        """Add a rule for JSON values of any of these schemas; return it with the end tag."""
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        whole = with_root(schema, root)
        if "x-guidance" in root:
            whole["x-guidance"] = root["x-guidance"]
        self._rules.append(f"json_{name}: %json {json.dumps(compact(whole))}")
        parts = [f"json_{name}"]
        if self._syntax.padding:
            parts.append(json.dumps(self._syntax.padding))
        parts.append(self._end_token or json.dumps(self._syntax.end))
        return " ".join(parts)

    def _choices(self, values: Alternatives, key: str, root: Schema) -> list[list[str]]:
        """Return patterns of the listed values that are read back as they are."""
        spelled = []
        for choice in values.choices:
            text = choice if isinstance(choice, str) else json.dumps(choice, ensure_ascii=False)
            if self._syntax.end in text or self._syntax.mark in text:
                continue
            if json.dumps(as_value(text, key, root)) == json.dumps(choice):
                spelled.append(re.escape(text))
        if not spelled:
            return []
        return [["|".join(spelled)]]

    def _text(self, name: str, patterns: Sequence[str], excluded: Sequence[str] = ()) -> str:
        """Add a terminal for texts that match all patterns; return it with the end tag."""
        tag = re.escape(self._syntax.end)
        end = re.escape(self._syntax.padding)
        # The first tag is the last tag.
        early = f"(?s:.*){tag}(?s:.*)"
        if not self._end_token:
            end += tag
            early = f"(?s:.*){tag}(?s:.+)"
        never = [early, f"(?s:.*){re.escape(self._syntax.mark)}(?s:.*)"]
        parts = [lark_literal(f"(?:{pattern}){end}") for pattern in patterns]
        parts += [f"~{lark_literal(pattern)}" for pattern in never]
        self._rules.append(f"{name}: {' & '.join([*parts, *excluded])}")
        return f"{name} {self._end_token}"

    def _refusal(self, key: str, part: str) -> RequestError:
        place = f"parameter {key!r} of " if key else "the parameters of "
        return RequestError(
            f"tools: {place}{self._function}: calls of this model, whose arguments are plain text, cannot be forced or "
            f"strict with {part}; change the schema, or use tool_choice auto without strict",
            "tools",
            "unsupported_value",
        )
