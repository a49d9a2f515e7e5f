"""Types arguments that a format writes as plain text, by their JSON schema.

A text becomes the JSON value that it spells if the schema admits that value, else a string. Types, enum, const,
internal references and combinations of a schema are considered; bounds and patterns do not decide between two types.
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
_MOST_STEPS = 200
"""Maximum number of references and combinations that are followed for one value."""


def as_value(text: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """Return the value of an argument; parameters: the schema of the function's arguments."""
    schemas = _Schemas(parameters)
    of_key = schemas.at(parameters, key)
    for value in _readings(text):
        if schemas.admit(of_key, value):
            is_whole = isinstance(value, float) and value.is_integer() and not schemas.admit(of_key, value + 0.5)
            return int(value) if is_whole else value  # clients of integers may not read 5.0
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


def referred(root: Mapping[str, Any], reference: Any) -> Any:
    """Return the schema of a reference within `root`; an unrestricted one if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found


def _readings(text: str) -> list[Any]:
    """Yield the values that a text may stand for besides itself, the likeliest first."""
    readings: list[Any] = []
    with contextlib.suppress(ValueError, RecursionError):
        spelled = json.loads(text, parse_constant=finite_number, parse_float=finite_number)
        # A string in quotes is text; its quotes are dropped only if the schema does not admit them.
        readings += [text, spelled] if isinstance(spelled, str) else [spelled]
    if (spelled := text.strip().lower()) in _SPELLINGS and not readings:
        # Only if the schema does not admit the text itself.
        readings += [text, _SPELLINGS[spelled]]
    return readings


def finite_number(text: str) -> float:
    """Return a JSON number. Raises ValueError for NaN and infinity, which Python's decoder accepts."""
    if not math.isfinite(number := float(text)):
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
        if not is_of(value, schema.get("type")):
            return isinstance(schema.get("nullable"), bool) and schema["nullable"] and value is None
        choices = schema["enum"] if isinstance(schema.get("enum"), list) else None
        if "const" in schema:
            choices = [schema["const"]]
        if choices is not None and not any(_equal(value, one) for one in choices):
            return False
        return all(self.admit(one, value) for one in _schemas(schema, "allOf")) and all(
            any(self.admit(one, value) for one in some)
            for name in ("anyOf", "oneOf")
            if (some := _schemas(schema, name))
        )

    def at(self, schema: Any, key: str) -> Schema | None:
        """Return the schema of a property; None if the schema does not define it."""
        self._num_steps += 1
        if not isinstance(schema, Mapping) or self._num_steps > _MOST_STEPS:
            return None
        properties = schema.get("properties")
        found: list[Schema | None] = []
        if isinstance(properties, Mapping) and key in properties:
            found.append(properties[key])
        elif isinstance(schema.get("additionalProperties"), Mapping):
            found.append(schema["additionalProperties"])
        if "$ref" in schema:
            found.append(self.at(referred(self._root, schema["$ref"]), key))
        found += [self.at(one, key) for one in _schemas(schema, "allOf")]
        for name in ("anyOf", "oneOf"):
            some = [known for one in _schemas(schema, name) if (known := self.at(one, key)) is not None]
            found.append({"anyOf": some} if some else None)
        every = [one for one in found if one is not None]
        return {"allOf": every} if every else None


def _schemas(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else ()


def is_of(value: Any, types: Any) -> bool:
    """Return whether a value has one of the types of a JSON schema; None stands for any."""
    some = [types] if isinstance(types, str) else types
    return not isinstance(some, list) or any(_has_type(value, name) for name in some)


def _has_type(value: Any, name: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return bool(name == ("null" if value is None else "boolean"))
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and value == int(value))
    return isinstance(value, {"string": str, "object": dict, "array": list}.get(name, ()))


def _equal(one: Any, other: Any) -> bool:
    """Compare JSON values; true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
