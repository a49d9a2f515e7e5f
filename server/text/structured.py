"""Translates `response_format` and `structured_outputs` to a grammar for the engine.

This is text processing only. A separate process compiles the grammar, so that a bad one cannot harm other requests.
Not for: masks (`engine.grammar.grammar`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.api import RequestError
from server.wire.fields import GenerationFields
from server.wire.unsupported_fields import UNKNOWN

# vLLM's older names of `structured_outputs`.
_OLD_NAMES = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# Escaped characters are unchanged; a slash or a line break would end the literal.
_IN_LITERAL = re.compile(r"\\[\n\r]|\\.|/|[\n\r]")
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
# Keys of `response_format` by its type, and those of `json_schema` in it.
_FORMAT_KEYS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
_JSON_SCHEMA_KEYS = ("name", "description", "schema", "strict")
# vLLM's options for white space in JSON.
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
_GBNF_RULE = re.compile(r"\A(?:\s|#[^\n]*\n)*[A-Za-z][\w-]*\s*::=")
LONGEST_GRAMMAR = 1 << 16
"""Maximum number of characters."""


# The grammar would allow any white space, and models at temperature 1 fill answers with it.
_COMPACT = {"whitespace_flexible": False}
_FLEXIBLE = {"whitespace_flexible": True}


_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Formats of strings that llguidance supports."""
# Keys of a schema that contain schemas: by name; one, or a list.
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"}
    | {"additionalProperties", "unevaluatedProperties", "propertyNames"}
    | {"anyOf", "allOf", "oneOf", "not", "if", "then", "else"}
)


_NULL_VALUES = frozenset({"const", "default"})
"""Keywords with null as a value."""
_LARGEST_INTEGER = 92 * 10**17
"""Bound of integers without one: all of 64 bits but the last per cent, where the grammar library's own bounds are."""
_BOUNDS = (("minimum", "exclusiveMinimum", -_LARGEST_INTEGER), ("maximum", "exclusiveMaximum", _LARGEST_INTEGER))
# Keys with which an object may have properties that are not listed.
_PARTS = frozenset(
    {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties", "dependentSchemas"}
)


@dataclass(frozen=True)
class Structure:
    """Structure that an answer must have."""

    grammar: str = ""
    """Grammar in the engine's format; "" for none."""
    param: str | None = None
    """Field that requested it."""
    rule: str = ""
    """The same as the right side of a rule in Lark, to combine it with others; "" for grammars of clients."""


def structure_of(body: GenerationFields) -> Structure:
    """Return the structure that a body requests; raises RequestError for an invalid one."""
    wanted: list[tuple[str, str, Any]] = []
    if body.response_format is not None:
        wanted += _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        wanted += _of_kinds(body.structured_outputs, "structured_outputs")
    for name, kind in _OLD_NAMES.items():
        if getattr(body, name) is not None:
            wanted.append((name, kind, getattr(body, name)))
    if not wanted:
        return Structure()
    if len(wanted) > 1:
        raise RequestError(f"{wanted[0][0]} and {wanted[1][0]}: ask for one structure only", wanted[1][0])
    param, kind, value = wanted[0]
    try:
        grammar, rule = _compile(param, kind, value)
        grammar.encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"{param}: half characters or too much nesting ({type(error).__name__})", param) from error
    if len(grammar) > LONGEST_GRAMMAR:
        raise RequestError(f"{param}: the grammar has {len(grammar)} characters, more than {LONGEST_GRAMMAR}", param)
    return Structure(grammar, param, rule)


def _of_response_format(value: Any) -> list[tuple[str, str, Any]]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise RequestError("response_format.type must be text, json_object or json_schema", "response_format")
    _refuse_odd(value, ("type", *_FORMAT_KEYS[kind]), "response_format")
    if kind == "text":
        return []
    if kind == "json_object":
        schema = value.get("schema")
        return [("response_format", "json", {"type": "object"} if schema is None else schema)]
    outer = value.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        raise RequestError("response_format: json_schema.schema must hold the schema", "response_format")
    _refuse_odd(outer, _JSON_SCHEMA_KEYS, "response_format.json_schema")
    return [("response_format", "json", schema)]


def _refuse_odd(value: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raise RequestError for an unknown key of an object."""
    if odd := next((key for key in value if key not in known and value[key] is not None), None):
        param = f"{where}.{odd}"
        raise RequestError(f"Unrecognized request argument supplied: {param}", param, UNKNOWN)


def _of_kinds(value: Any, param: str) -> list[tuple[str, str, Any]]:
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object with json, regex, choice or grammar", param)
    options = {name: value.get(name) for name in _OPTIONS}
    kinds = [(param, kind, value[kind]) for kind in value if kind not in _OPTIONS and value[kind] is not None]
    for _, kind, _ in kinds:
        if kind not in _OLD_NAMES.values():
            raise RequestError(f"{param}.{kind} is not supported; use json, regex, choice or grammar", param)
    return [(param, kind, _with_whitespace(of_kind, kind, options, param)) for param, kind, of_kind in kinds]


def _with_whitespace(value: Any, kind: str, options: Mapping[str, Any], param: str) -> Any:
    """Return a schema with vLLM's options of white space inserted."""
    compact, pattern = (options[name] for name in _OPTIONS)
    if compact is None and pattern is None:
        return value
    if kind != "json":
        raise RequestError(f"{param}: {' and '.join(_OPTIONS)} go with json only", param)
    if not isinstance(compact, bool | None) or not isinstance(pattern, str | None):
        raise RequestError(f"{param}: {_OPTIONS[0]} must be true or false, {_OPTIONS[1]} a regular expression", param)
    schema = _schema_of(value, param)
    space = _COMPACT if compact else {"whitespace_pattern": pattern} if pattern is not None else _FLEXIBLE
    return {"x-guidance": space, **schema} if isinstance(schema, dict) else schema


def _compile(param: str, kind: str, value: Any) -> tuple[str, str]:
    """Return a grammar in llguidance's format, and as the right side of a rule."""
    if kind == "json":
        schema = compact(_schema_of(value, param))
        return json.dumps({"grammars": [{"json_schema": schema}]}), f"%json {json.dumps(schema)}"
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise RequestError(f"{param}: choice must be a list of strings that are not empty", param)
        value, kind = "|".join(f"({re.escape(one)})" for one in value), "regex"
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param}: {kind} must be a string that is not empty", param)
    if kind == "grammar":
        return _lark(param, value), ""
    literal = lark_literal(value)
    return f"start: {literal}", literal


def compact(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return a schema whose JSON has no white space between its parts, unless it says otherwise.

    schema: without unknown formats and nulls (`cleaned`), or with them.
    """
    return {"x-guidance": _COMPACT, **cleaned(schema)} if isinstance(schema, dict) else schema


def cleaned(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without keywords that are null, which generators write for absent ones, and without formats that
    the grammar library does not support, as JSON schema ignores unknown formats. Its integers have bounds.
    """
    result: dict[str, Any] = _cleaned(schema)
    return result


def closed(schema: dict[str, Any], is_root: bool = False) -> dict[str, Any]:
    """Return a schema of arguments whose objects allow no properties besides the listed ones, unless it says so.

    Without this, a model may invent names. Objects without listed properties remain open, except for the root. Objects
    that are combined from parts (`allOf`, a reference next to properties) remain open, and so do definitions in such
    schemas: a closed part would forbid the properties of the other parts.
    """
    result: dict[str, Any] = _closed(schema, is_root, with_definitions=not _has_parts(schema))
    return result


def _closed(schema: Any, is_root: bool, with_definitions: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key, value in schema.items():
        if key == "properties" or (with_definitions and key in ("$defs", "definitions")):
            if isinstance(value, dict):
                result[key] = {name: _closed(one, False, with_definitions) for name, one in value.items()}
        elif key in ("items", "additionalProperties"):
            result[key] = _closed(value, False, with_definitions)
        elif key in ("prefixItems", "anyOf", "oneOf") and isinstance(value, list) and "properties" not in schema:
            result[key] = [_closed(one, False, with_definitions) for one in value]
    is_object = schema.get("type", "object") == "object" and (is_root or bool(schema.get("properties")))
    if is_object and schema.keys().isdisjoint(_PARTS):
        result.setdefault("additionalProperties", False)
    return result


def _has_parts(schema: Any) -> bool:
    """Return whether a schema contains an object that is combined from several parts."""
    if isinstance(schema, list):
        return any(map(_has_parts, schema))
    if not isinstance(schema, dict):
        return False
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return (
        several or ("properties" in schema and not schema.keys().isdisjoint(_PARTS)) or _has_parts([*schema.values()])
    )


def _cleaned(schema: Any, is_negated: bool = False) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: value
        for key, value in schema.items()
        if (value is not None or key in _NULL_VALUES) and (key != "format" or value in _FORMATS)
    }
    for key, value in kept.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _cleaned(one, is_negated) for name, one in value.items()}
        elif key in _SCHEMAS:
            of_key = is_negated or key in ("not", "if")
            kept[key] = [_cleaned(one, of_key) for one in value] if isinstance(value, list) else _cleaned(value, of_key)
    return kept if is_negated else _with_bounds(kept)


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose integers have bounds: a small model that repeats a digit would never end its answer."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or not schema.keys().isdisjoint(("enum", "const")):
        return schema
    stated = [schema[key] for keys in _BOUNDS for key in keys[:2] if key in schema]
    if not all(isinstance(one, int | float) and abs(one) < _LARGEST_INTEGER for one in stated):
        return schema
    missing = {key: bound for key, exclusive, bound in _BOUNDS if schema.keys().isdisjoint((key, exclusive))}
    return {**schema, **missing}


def _schema_of(value: Any, param: str) -> dict[str, Any] | bool:
    """Return a schema that is given as an object or as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param}: the schema is not valid JSON ({error})", param) from error
    if not isinstance(value, dict | bool):
        raise RequestError(f"{param}: a schema must be an object", param)
    return value


def _lark(param: str, grammar: str) -> str:
    """Return a grammar in Lark's notation; one in GBNF (llama.cpp) or EBNF is translated. Raises RequestError."""
    if not _GBNF_RULE.search(grammar) or len(grammar) > LONGEST_GRAMMAR:
        return grammar
    # Imported when it is needed: other requests do without the library in this process.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # the translator indexes beyond the end of some wrong grammars
        raise RequestError(
            f"{param}: the grammar is not valid GBNF ({error}); correct it or send Lark", param
        ) from error


def lark_literal(regex: str) -> str:
    """Return a regular expression as a literal of Lark, with escapes for characters that would end it."""
    return f"/{_IN_LITERAL.sub(lambda found: _ESCAPES.get(found[0], found[0]), regex)}/"
