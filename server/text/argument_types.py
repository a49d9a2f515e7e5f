"""Types arguments that a format writes as plain text, by their JSON schema.

A text becomes the JSON value that it spells if the schema admits that value, else a string. Types,
enum, const, internal references and combinations of a schema are considered; bounds and patterns do
not decide between two types.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any] | bool

_SPELLINGS = {"true": True, "false": False, "none": None, "null": None}
"""Values that some templates spell as Python does."""
_CHECKED = frozenset(
    {"type", "enum", "const", "properties", "required", "items", "additionalProperties", "title", "description"}
)
_MOST_STEPS = 200
"""Maximum number of references and combinations that are followed for one value."""


def as_value(text: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """Return the value of an argument; parameters: the schema of the function's arguments."""
    schemas = _Schemas(parameters)
    schema = schemas.at(parameters, key)
    for value in _readings(text):
        if not schemas.admit(schema, value):
            continue
        if isinstance(value, float) and value.is_integer() and not schemas.admit(schema, value + 0.5):
            return int(value)  # clients of integers may not read 5.0
        return value
    return text


def is_value(text: str, key: str, parameters: Mapping[str, Any]) -> bool:
    """Return whether a text is complete JSON, or a string that the schema of an argument admits."""
    schemas = _Schemas(parameters)
    if schemas.admit(schemas.at(parameters, key), text):
        return True
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text)
        return True
    return False


def follows(arguments: Any, parameters: Mapping[str, Any], is_exact: bool) -> bool:
    """Return whether a call's arguments have the names and types of their schema.

    is_exact: the schema must have no other keywords than those that are checked.
    """
    return _Schemas(parameters).follow({"type": "object", **parameters}, arguments, is_exact)


def part_of(schema: Mapping[str, Any], name: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a property, or of a list's elements (`item`)."""
    part = _Schemas(root).at(schema, name)
    wrapped = [schema, *_schemas(schema, "allOf")]
    if part is None and name == "item":
        part = next((one["items"] for one in wrapped if isinstance(one, Mapping) and "items" in one), None)
    return part if isinstance(part, Mapping) else {}


def referred(root: Mapping[str, Any], reference: Any) -> Any:
    """Return the schema of a reference within `root`; an unrestricted one if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    part: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            return True
    return part


def _readings(text: str) -> list[Any]:
    """Return the values that a text may stand for besides itself, the likeliest first."""
    readings: list[Any] = []
    with contextlib.suppress(ValueError, RecursionError):
        spelled = json.loads(text, parse_constant=finite_number, parse_float=finite_number)
        if isinstance(spelled, str):
            # A string in quotes is text; its quotes are dropped only if the schema does not admit
            # them.
            readings.append(text)
        readings.append(spelled)
    if (spelled := text.strip().lower()) in _SPELLINGS and not readings:
        # Only if the schema does not admit the text itself.
        readings += [text, _SPELLINGS[spelled]]
    return readings


def finite_number(text: str) -> float:
    """Return a finite JSON number; raises ValueError for any other."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


class _Schemas:
    """Schema with a resolver of its references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_steps = 0

    def admit(self, schema: Any, value: Any) -> bool:
        """Return whether a schema admits a value, as far as this module checks."""
        self._num_steps += 1
        if not isinstance(schema, Mapping) or self._num_steps > _MOST_STEPS:
            return schema is not False
        if "$ref" in schema and not self.admit(referred(self._root, schema["$ref"]), value):
            return False
        if not has_type(value, schema.get("type")):
            return value is None and schema.get("nullable") is True
        choices = schema.get("enum")
        if "const" in schema:
            choices = [schema["const"]]
        if isinstance(choices, list) and not any(_equal(value, choice) for choice in choices):
            return False
        if not all(self.admit(part, value) for part in _schemas(schema, "allOf")):
            return False
        for name in ("anyOf", "oneOf"):
            branches = _schemas(schema, name)
            if branches and not any(self.admit(branch, value) for branch in branches):
                return False
        return True

    def follow(self, schema: Any, value: Any, is_exact: bool) -> bool:
        """Return whether a value and its parts are admitted, with all required properties."""
        if not isinstance(schema, Mapping):
            return schema is not False
        if is_exact and not schema.keys() <= _CHECKED:
            return False
        if not self.admit(schema, value):
            return False
        if isinstance(value, list):
            return all(self.follow(schema.get("items"), one, is_exact) for one in value)
        if not isinstance(value, dict):
            return True
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            properties = {}
        required = schema.get("required")
        if isinstance(required, list) and not all(name in value for name in required if isinstance(name, str)):
            return False
        if is_exact and not value.keys() <= properties.keys():
            return False
        return all(self.follow(properties.get(key), part, is_exact) for key, part in value.items())

    def at(self, schema: Any, key: str) -> Schema | None:
        """Return the schema of a property; None if the schema does not define it."""
        self._num_steps += 1
        if not isinstance(schema, Mapping) or self._num_steps > _MOST_STEPS:
            return None
        properties = schema.get("properties")
        parts: list[Schema | None] = []
        if isinstance(properties, Mapping) and key in properties:
            parts.append(properties[key])
        elif isinstance(schema.get("additionalProperties"), Mapping):
            parts.append(schema["additionalProperties"])
        if "$ref" in schema:
            parts.append(self.at(referred(self._root, schema["$ref"]), key))
        parts += [self.at(part, key) for part in _schemas(schema, "allOf")]
        for name in ("anyOf", "oneOf"):
            branches = [self.at(branch, key) for branch in _schemas(schema, name)]
            parts.append(_combined("anyOf", branches))
        return _combined("allOf", parts)


def _combined(name: str, schemas: Sequence[Schema | None]) -> Schema | None:
    defined = [schema for schema in schemas if schema is not None]
    return {name: defined} if defined else None


def _schemas(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    schemas = schema.get(name)
    return schemas if isinstance(schemas, list) else ()


def has_type(value: Any, types: Any) -> bool:
    """Return whether a value has one of the types of a JSON schema; None stands for any."""
    if isinstance(types, str):
        types = [types]
    return not isinstance(types, list) or any(_is_a(value, name) for name in types)


def _is_a(value: Any, name: Any) -> bool:
    if value is None:
        return bool(name == "null")
    if isinstance(value, bool):
        return bool(name == "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    return isinstance(value, {"string": str, "object": dict, "array": list}.get(name, ()))


def _equal(value: Any, other: Any) -> bool:
    """Compare JSON values; true is not 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)
