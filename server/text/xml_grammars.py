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
from server.text.call_formats import DSML, MINIMAX
from server.text.schemas import compact
from server.text.structured import lark_literal
from server.text.text_values import Alternatives, CannotSplit, Schema, alternatives, merged, with_root


@dataclass(frozen=True)
class XmlSyntax:
    """Text around an argument's value."""

    begin: str
    """Right side of a rule for the text before a value; KEY stands for the argument's name."""
    end: str
    """Tag that ends a value; KEY stands for the argument's name."""
    padding: str
    """Text at both ends of a value that is not a part of it; the first one is in `begin`."""
    after: str
    """Right side of a rule for the text after an argument."""
    mark: str = "<tool_call>"
    """Text that no string contains, because it begins a call."""
    key: str = r"[^<>\n]{1,200}"
    """Pattern of arguments' names."""
    types: tuple[str, str] = ("", "")
    """Texts for TYPE in `begin` before strings and before JSON; "" if the tag has no type."""


_ATTRIBUTE = r'[^<>"\n]{1,200}'
XML_SYNTAXES: Mapping[str, XmlSyntax] = {
    "qwen3_coder": XmlSyntax(r'"<parameter=" KEY ">\n"', "</parameter>", "\n", r'"\n"'),
    "glm": XmlSyntax(r'"<arg_key>" KEY "</arg_key>" "\n"? "<arg_value>"', "</arg_value>", "", r'"\n"?'),
    "minimax_m2": XmlSyntax(
        r'"<parameter name=\"" KEY "\">"', "</parameter>", "", r'"\n"?', "<invoke name=", _ATTRIBUTE
    ),
    "minimax_m3": XmlSyntax(f'"{MINIMAX}<" KEY ">"', f"{MINIMAX}</KEY>", "", '""', MINIMAX, r"[^<>\s/]{1,200}"),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4"),
        XmlSyntax(
            rf'"<{DSML}parameter name=\"" KEY "\" string=\"TYPE\">"', f"</{DSML}parameter>", "", r'"\n"?',
            f"<{DSML}", _ATTRIBUTE, types=("true", "false"),
        ),
    ),
    "kimi_k3": XmlSyntax(
        r'"<|open|>" "argument key=\"" KEY "\" type=\"TYPE\"" "<|sep|>"', "<|close|>", "", '"argument" "<|sep|>"',
        "<|open|>", _ATTRIBUTE, ("string", r'" ("number" | "boolean" | "null" | "object" | "array") "'),
    ),
    **{
        f"hy3{name}": XmlSyntax(
            rf'"<arg_key{suffix}>" KEY "</arg_key{suffix}>" "\n"? "<arg_value{suffix}>"', f"</arg_value{suffix}>", "",
            r'"\n"?', f"<tool_call{suffix}>",
        )
        for name, suffix in (("", ""), ("_opensource", ":opensource"))
    },
}  # fmt: skip
_ROOT_KEYS = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_BEGINS_AS_JSON = r"~/\s*[-0-9\[{](?s:.*)/"


class XmlArguments:
    """Rules of one function's arguments."""

    def __init__(
        self, syntax: XmlSyntax, with_marks: Callable[[str], str], end_token: str, function: str, number: int
    ) -> None:
        """end_token: the special token for the tag that ends a value, in Lark; "" if it is text."""
        self._syntax = syntax
        self._with_marks = with_marks
        self._end_token = end_token
        self._function = function
        self._number = number
        self._rules: list[str] = []

    def unrestricted(self, schema: Schema) -> list[str]:
        """Return the rules for any arguments, with known names if an end repeats the name."""
        keys = [lark_literal(self._syntax.key)]
        if "KEY" in self._syntax.end:
            names = [name for name in schema.get("properties") or {} if re.fullmatch(self._syntax.key, name)]
            keys = [json.dumps(name) for name in names]
        arguments = []
        for place, key in enumerate(keys):
            arguments.append(self._argument(key, [self._text(f"TEXT_{self._number}_{place}", ["(?s:.*)"], key)], []))
        every = f"({' | '.join(arguments)})*" if arguments else '""'
        return [f"args_{self._number}: {every}", *self._rules]

    def following(self, schema: Schema) -> list[str]:
        """Return the rules for arguments that follow a schema; raises RequestError."""
        properties, required = self._properties(schema)
        arguments = []
        for place, (key, key_schema) in enumerate(properties.items()):
            name = f"{self._number}_{place}"
            strings, others = self._value(name, key, key_schema, schema)
            self._rules.append(f"arg_{name}: {self._argument(json.dumps(key), strings, others)}")
            arguments.append(f"arg_{name}" if key in required else f"arg_{name}?")
        every = " ".join(arguments) or '""'
        return [f"args_{self._number}: {every}", *self._rules]

    def _properties(self, schema: Schema) -> tuple[Mapping[str, Any], Sequence[str]]:
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
        if odd := next((key for key in properties if not re.fullmatch(self._syntax.key, key)), None):
            raise self._refusal("", f"the name {odd!r}")
        if not properties and root.get("additionalProperties", True) is not False:
            raise self._refusal("", "properties without names")
        return properties, required

    def _argument(self, key: str, strings: Sequence[str], others: Sequence[str]) -> str:
        begin = self._with_marks(self._syntax.begin).replace("KEY", key)
        after = self._with_marks(self._syntax.after)
        if not any(self._syntax.types):
            return f"{begin} ({' | '.join([*strings, *others])}) {after}"
        sides = []
        for kind, values in zip(self._syntax.types, (strings, others), strict=True):
            if values:
                sides.append(f"{begin.replace('TYPE', kind)} ({' | '.join(values)})")
        return f"({' | '.join(sides)}) {after}"

    def _value(self, name: str, key: str, schema: Any, root: Schema) -> tuple[list[str], list[str]]:
        """Return rules for strings and for JSON, with their end; raises RequestError."""
        try:
            values = alternatives(schema, root)
        except CannotSplit as error:
            raise self._refusal(key, str(error)) from error
        excluded = (_BEGINS_AS_JSON,) if values.are_bounded and not any(self._syntax.types) else ()
        patterns = [*values.strings, *self._choices(values, key, root)]
        strings = [
            self._text(f"TEXT_{name}_{place}", one, json.dumps(key), excluded) for place, one in enumerate(patterns)
        ]
        schemas = [*values.others]
        if any(self._syntax.types):
            schemas += [{"const": choice} for choice in values.choices if not isinstance(choice, str)]
        others = []
        if schemas:
            others.append(self._json(name, schemas, root, key))
        if not strings and not others:
            raise self._refusal(key, "any of its values")
        return strings, others

    def _json(self, name: str, schemas: Sequence[Schema], root: Schema, key: str) -> str:
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        whole = with_root(schema, root)
        if "x-guidance" in root:
            whole["x-guidance"] = root["x-guidance"]
        self._rules.append(f"json_{name}: %json {json.dumps(compact(whole))}")
        parts = [f"json_{name}"]
        if self._syntax.padding:
            parts.append(json.dumps(self._syntax.padding))
        parts.append(self._end_token or json.dumps(self._syntax.end.replace("KEY", key)))
        return " ".join(parts)

    def _choices(self, values: Alternatives, key: str, root: Schema) -> list[list[str]]:
        """Return patterns of the listed values that are read back as they are."""
        spelled = []
        for choice in values.choices:
            if any(self._syntax.types) and not isinstance(choice, str):
                continue
            text = choice if isinstance(choice, str) else json.dumps(choice, ensure_ascii=False)
            if self._syntax.end.replace("KEY", key) in text or self._syntax.mark in text:
                continue
            if any(self._syntax.types) or json.dumps(as_value(text, key, root)) == json.dumps(choice):
                spelled.append(re.escape(text))
        if not spelled:
            return []
        return [["|".join(spelled)]]

    def _text(self, name: str, patterns: Sequence[str], key: str, excluded: Sequence[str] = ()) -> str:
        """Add a terminal for texts that match all patterns; return it with its end."""
        if self._syntax.mark == MINIMAX:
            # The first tag within a value is the one that ends it.
            bounded = [lark_literal(f"(?:{pattern}){re.escape(MINIMAX)}<") for pattern in patterns]
            self._rules.append(f"{name.lower()}[lazy]: {' & '.join([*bounded, *excluded])}")
            return f'{name.lower()} "/" {key} ">"'
        tag = re.escape(self._syntax.end)
        end = re.escape(self._syntax.padding)
        # The first tag is the last tag.
        early = f"(?s:.*){tag}(?s:.*)"
        if not self._end_token:
            end += tag
            early = f"(?s:.*){tag}(?s:.+)"
        mark = re.escape(self._syntax.mark)
        never = [early, f"(?s:.*){mark}(?s:.*)"]
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
