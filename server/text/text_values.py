"""Splits the schema of a value into strings, which some formats write as plain text, and JSON.

Not for: schemas of values that are JSON anyway (`structured.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from server.text.argument_types import has_type, referred
from server.text.patterns import has_outer_choice

Schema = Mapping[str, Any]
ANY_TEXT = "(?s:.*)"
"""Pattern of all texts."""

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$id", "x-guidance", "strict", "nullable"}
)
_STRING_KEYS = frozenset({"type", "pattern", "minLength", "maxLength", "format"})
_MOST_STEPS = 200
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
"""Numbers that are finite, as clients cannot read others."""
_ROOT = "call_arguments"
"""Name of the whole schema among the definitions of a part."""
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_LAST_DAYS = "(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31"
_DATE = f"[1-9][0-9]{{3}}-(?:(?:0[1-9]|1[0-2])-{_DAY}|{_LAST_DAYS})"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,9}}"
_PATH = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "hostname": _HOST,
    "email": rf"[a-zA-Z0-9_+-]{{1,64}}(?:\.[a-zA-Z0-9_+-]{{1,64}}){{0,9}}@{_HOST}",
    "uri": rf"[a-z][a-z0-9+.-]{{0,30}}://(?:{_HOST}(?::[0-9]{{1,4}})?)?(?:/{_PATH}{{0,99}}){{0,19}}(?:\?{_PATH}{{0,999}})?",
}
"""Patterns of texts that certainly have a format; some other texts have it, too."""


class CannotSplit(Exception):
    """A schema that cannot be split; the text names the part of it."""


@dataclass
class Alternatives:
    """Values that follow a schema."""

    choices: list[Any] = field(default_factory=list)
    """Values that are listed."""
    strings: list[list[str]] = field(default_factory=list)
    """Texts that match all regular expressions of one of these lists."""
    others: list[Schema] = field(default_factory=list)

    @property
    def are_bounded(self) -> bool:
        """Whether a text in JSON may have a type of `others` without following the schema."""
        plain = ({"type": "null"}, {"type": "boolean"}, {"type": "integer"})
        return any(schema not in plain for schema in self.others)


def alternatives(schema: Any, root: Schema) -> Alternatives:
    """Return the values that follow a schema; raises CannotSplit. root: resolves its references."""
    values = Alternatives()
    _Splitter(root, values).split(schema)
    return values


def merged(schema: Any, root: Schema) -> dict[str, Any]:
    """Return a schema without references at its top and `allOf`. Raises CannotSplit."""
    return _Splitter(root, Alternatives()).merged(schema)


def with_root(schema: Schema, root: Schema) -> dict[str, Any]:
    """Return a schema with its references in itself: the whole schema is one of its definitions."""
    moved = _moved(schema)
    if moved == schema:
        return dict(schema)
    whole = {key: value for key, value in _moved(root).items() if key not in ("$id", "$schema")}
    return {**moved, "$defs": {**moved.get("$defs", {}), _ROOT: whole}}


def _moved(part: Any) -> Any:
    """Return a part of a schema with references to the whole as references to its definition."""
    if isinstance(part, list):
        return [_moved(element) for element in part]
    if not isinstance(part, Mapping):
        return part
    moved = dict(part)
    for key, value in part.items():
        if key not in ("const", "enum", "default"):
            moved[key] = _moved(value)
    if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#"):
        moved["$ref"] = f"#/$defs/{_ROOT}{part['$ref'][1:]}"
    return moved


class _Splitter:
    def __init__(self, root: Schema, values: Alternatives) -> None:
        """values: receives the values that follow a schema."""
        self._root = root
        self._values = values
        self._num_steps = 0

    def merged(self, schema: Any) -> dict[str, Any]:
        self._num_steps += 1
        if self._num_steps > _MOST_STEPS:
            raise CannotSplit("references without an end")
        if schema is False:
            raise CannotSplit("a value that is forbidden")
        if not isinstance(schema, Mapping):
            return {}
        is_nullable = schema.get("nullable") is True
        left_out = _ANNOTATIONS | {"$ref", "allOf"}
        parts = [{key: value for key, value in schema.items() if key not in left_out}]
        if "$ref" in schema:
            parts.append(self.merged(referred(self._root, schema["$ref"])))
        parts += [self.merged(part) for part in schema.get("allOf") or ()]
        result: dict[str, Any] = {}
        if patterns := [pattern for part in parts for pattern in _listed(part.pop("pattern", []))]:
            result["pattern"] = patterns
        for part in parts:
            if twice := next((key for key in part if key in result and result[key] != part[key]), None):
                raise CannotSplit(f"{twice!r} in several parts of one schema")
            result |= part
        if is_nullable and isinstance(result.get("type"), str):
            result["type"] = [result["type"], "null"]
        return result

    def split(self, schema: Any) -> None:
        """Add the values that follow a schema."""
        schema = self.merged(schema)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                self._split_each(schema, name)
                return
        if "const" in schema or "enum" in schema:
            self._choose(schema)
            return
        for kind in self._types(schema):
            if kind == "string":
                self._values.strings.append(patterns_of(schema))
                continue
            typed = {key: value for key, value in schema.items() if key not in _STRING_KEYS} | {"type": kind}
            if typed == {"type": "number"}:
                self._values.strings.append([_NUMBER])
            else:
                self._values.others.append(typed)

    def _split_each(self, schema: dict[str, Any], name: str) -> None:
        typed = {key: schema[key] for key in schema if key == "type"}
        branches = [self.merged({"allOf": [typed, branch]}) for branch in schema[name]]
        other_keys = schema.keys() - {name, "type"}
        if other_keys:
            raise CannotSplit(f"{name!r} next to {min(other_keys)!r}")
        types = {str(branch.get("type")) for branch in branches}
        if name == "oneOf" and len(types) < len(branches):
            raise CannotSplit("'oneOf' of several values of one type")
        for branch in branches:
            self.split(branch)

    def _choose(self, schema: dict[str, Any]) -> None:
        if others := schema.keys() - {"const", "enum", "type"}:
            raise CannotSplit(f"{min(others)!r} next to listed values")
        values = [schema["const"]] if "const" in schema else schema["enum"]
        self._values.choices += [value for value in values if has_type(value, schema.get("type"))]

    def _types(self, schema: dict[str, Any]) -> Sequence[str]:
        if "type" in schema:
            types = schema["type"]
            return [types] if isinstance(types, str) else types
        if not schema:
            return ["string"]  # the reader turns texts in JSON into any value
        for kind, keys in {"object": ("properties", "additionalProperties"), "array": ("items", "prefixItems")}.items():
            if any(key in schema for key in keys):
                return [kind]
        if schema.keys() <= _STRING_KEYS:
            return ["string"]
        raise CannotSplit(f"{min(schema)!r} without a type")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def patterns_of(schema: Schema) -> list[str]:
    """Return regular expressions that a string must match as a whole. Raises CannotSplit.

    schema: merged.
    """
    if odd := schema.keys() - _STRING_KEYS:
        raise CannotSplit(f"{min(odd)!r} of a string")
    patterns = []
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise CannotSplit(f"the format {schema['format']!r}")
        patterns.append(FORMATS[schema["format"]])
    if "minLength" in schema or "maxLength" in schema:
        patterns.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    patterns += map(_whole, schema.get("pattern", ()))
    return patterns or [ANY_TEXT]


def _whole(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise CannotSplit(f"the pattern {pattern!r} ({error})") from error
    begin = ANY_TEXT
    end = ANY_TEXT
    body = pattern
    if body.startswith("^"):
        begin = ""
        body = body[1:]
    is_escaped = regex.search(r"(?<!\\)(?:\\\\)*\\\$\Z", body) is not None
    if body.endswith("$") and not is_escaped:
        end = ""
        body = body[:-1]
    is_anchored = begin == "" or end == ""
    if is_anchored and has_outer_choice(body):
        raise CannotSplit(f"the pattern {pattern!r}, whose ends hold for one of its choices; put them into a group")
    return f"{begin}(?:{body}){end}"
