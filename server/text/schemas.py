"""Prepares JSON schemas for the grammar library, which refuses what remains.

The library refuses what remains, and `schema_faults.py` names the place. Not
for: regular expressions (`patterns.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from server.text.patterns import has_look_around, without_look_around
from server.text.text_values import ANY_TEXT, CannotSplit, alternatives

# The grammar would allow any white space, and models at temperature 1 fill answers with it.
COMPACT = {"whitespace_flexible": False}
FLEXIBLE = {"whitespace_flexible": True}


_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
# Keys of a schema that contain schemas: by name; one, or a list.
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"}
    | {"additionalProperties", "unevaluatedProperties", "propertyNames"}
    | {"anyOf", "allOf", "oneOf", "not", "if", "then", "else"}
)


_NULL_VALUES = frozenset({"const", "default"})
_LARGEST_INTEGER = 92 * 10**17
"""Bound of integers without one, within the grammar library's own bounds."""
_BOUNDS = (("minimum", "exclusiveMinimum", -_LARGEST_INTEGER), ("maximum", "exclusiveMaximum", _LARGEST_INTEGER))
# Values with which a keyword says nothing, and keywords that say nothing without another one.
_SAY_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    **{key: ({},) for key in ("dependentRequired", "dependentSchemas", "dependencies")},
    **{key: (True, {}) for key in ("propertyNames", "unevaluatedProperties", "unevaluatedItems")},
}
_MOST_COPIED = 1 << 14
"""Maximum number of characters of properties with equal values."""
_NEEDS = {"then": ("if",), "else": ("if",), "if": ("then", "else")}
_NEEDS |= {"minContains": ("contains",), "maxContains": ("contains",)}
# Keys with which an object may have properties that are not listed.
_PARTS = frozenset(
    {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties", "dependentSchemas"}
)


def compact(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return a schema whose JSON has no white space between its parts, unless it says otherwise.

    schema: without unknown formats and nulls (`cleaned`), or with them.
    """
    if not isinstance(schema, dict):
        return schema
    guidance = schema.get("x-guidance", {})
    if isinstance(guidance, dict) and "whitespace_pattern" not in guidance:
        guidance = COMPACT | guidance
    return cleaned(schema) | {"x-guidance": guidance}


def cleaned(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in the words of the grammar library.

    Keywords that are null or say nothing, and unknown formats, are left out. Names of properties
    and look-around in patterns are translated if they have an equal. Integers have bounds.
    """
    result = _Cleaner(schema).cleaned(schema)
    # A schema that allows nothing is refused by the library as it was written.
    return result if isinstance(result, dict) else schema


def closed(schema: dict[str, Any], is_root: bool = False) -> dict[str, Any]:
    """Return a schema of arguments whose objects allow only the listed properties.

    Objects without listed properties remain open, except for the root, and so do objects that are
    combined from parts, because a closed part would forbid the properties of other parts.
    """
    result: dict[str, Any] = _closed(schema, is_root, with_definitions=not _has_parts(schema))
    return result


def _closed(schema: Any, is_root: bool, with_definitions: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    named = {"properties", "$defs", "definitions"} if with_definitions else {"properties"}
    for key, value in schema.items():
        if key in named and isinstance(value, dict):
            result[key] = {name: _closed(part, False, with_definitions) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            result[key] = _closed(value, False, with_definitions)
        elif key in ("prefixItems", "anyOf", "oneOf") and isinstance(value, list) and "properties" not in schema:
            result[key] = [_closed(part, False, with_definitions) for part in value]
    is_object = schema.get("type", "object") == "object"
    has_names = is_root or bool(schema.get("properties"))
    if is_object and has_names and schema.keys().isdisjoint(_PARTS):
        result.setdefault("additionalProperties", False)
    return result


def _has_parts(schema: Any) -> bool:
    """Return whether a schema contains an object that is combined from several parts."""
    if isinstance(schema, list):
        return any(map(_has_parts, schema))
    if not isinstance(schema, dict):
        return False
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1 and schema.get("type", "object") == "object":
        return True
    if "properties" in schema and not schema.keys().isdisjoint(_PARTS):
        return True
    return _has_parts([*schema.values()])


class _Cleaner:
    def __init__(self, root: Mapping[str, Any]) -> None:
        """root: resolves references."""
        self._root = root

    def cleaned(self, schema: Any, is_negated: bool = False) -> Any:
        """Return a part of the schema; is_negated: fewer values mean more of the whole."""
        if not isinstance(schema, dict):
            return schema
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if not _says_nothing(key, value, schema):
                result[key] = self._value(key, value, is_negated)
        if is_negated:
            return result
        if result.get("not") in ({}, True):
            return False
        return _with_bounds(_with_patterns(self._with_names(result)))

    def _value(self, key: str, value: Any, is_negated: bool) -> Any:
        if key in NAMED_SCHEMAS and isinstance(value, dict):
            return {name: self.cleaned(schema, is_negated) for name, schema in value.items()}
        if key not in SCHEMAS:
            return value
        are_negated = is_negated or key in ("not", "if")
        if isinstance(value, list):
            return [self.cleaned(schema, are_negated) for schema in value]
        return self.cleaned(value, are_negated)

    def _with_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with named or matching properties in the place of `propertyNames`."""
        if "propertyNames" not in schema:
            return schema
        rest = dict(schema)
        name_schema = rest.pop("propertyNames")
        if isinstance(name_schema, dict) and "pattern" in name_schema:
            # The pattern is its format in other words.
            name_schema = {key: value for key, value in name_schema.items() if key != "format"}
        try:
            names = alternatives(name_schema, self._root)
        except (CannotSplit, TypeError, AttributeError):  # the latter for values of other types than theirs
            return schema
        if [ANY_TEXT] in names.strings:
            return rest
        listed = [name for name in names.choices if isinstance(name, str)]
        patterns = [pattern for pattern, *others in names.strings if not others]
        is_known = len(patterns) == len(names.strings) and not rest.keys() & {"properties", "patternProperties"}
        if not is_known or not (listed or patterns):
            return schema
        value = rest.get("additionalProperties", True)
        if len(listed) * len(str(value)) > _MOST_COPIED:
            patterns += map(re.escape, listed)
            listed = []
        rest["properties"] = dict.fromkeys(listed, value)
        if patterns:
            rest["patternProperties"] = {f"^(?:{'|'.join(patterns)})$": value}
        return {**rest, "additionalProperties": False}


def _says_nothing(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None:
        return key not in _NULL_VALUES
    if key == "format":
        return value not in _FORMATS
    if key in _NEEDS and schema.keys().isdisjoint(_NEEDS[key]):
        return True
    return value in _SAY_NOTHING.get(key, ())


def _with_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not has_look_around(pattern) or not isinstance(schema.get("allOf", []), list):
        return schema
    first, *others = without_look_around(pattern) or [""]
    if first and others:
        return {
            **schema,
            "pattern": first,
            "allOf": [*schema.get("allOf", ()), *({"pattern": other} for other in others)],
        }
    if first:
        return {**schema, "pattern": first}
    if "format" in schema:
        return {key: value for key, value in schema.items() if key != "pattern"}
    return schema


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    types = schema.get("type")
    if not isinstance(types, list):
        types = [types]
    if not {"integer", "number"} & set(map(str, types)) or not schema.keys().isdisjoint(("enum", "const")):
        return schema
    result = dict(schema)
    for key, exclusive, bound in _BOUNDS:
        for name in (key, exclusive):
            stated = schema.get(name)
            if isinstance(stated, int | float) and (stated < bound < 0 or 0 < bound < stated):
                result[name] = bound
    stated = [result[key] for keys in _BOUNDS for key in keys[:2] if key in result]
    if "number" in types or not all(
        isinstance(bound, int | float) and abs(bound) <= _LARGEST_INTEGER for bound in stated
    ):
        return result
    missing = {key: bound for key, exclusive, bound in _BOUNDS if result.keys().isdisjoint((key, exclusive))}
    return {**result, **missing}
