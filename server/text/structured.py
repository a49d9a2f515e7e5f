"""Translates `response_format` and `structured_outputs` to a grammar for the engine.

This is text processing only. A separate process compiles the grammar, so that a bad one cannot harm
other requests. Not for: masks (`engine.grammar.grammar`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from engine.api import RequestError
from server.text.schema_faults import explained
from server.text.schemas import COMPACT, FLEXIBLE, compact
from server.wire.fields import GenerationFields
from server.wire.limits import LONGEST_GRAMMAR
from server.wire.unsupported_fields import UNKNOWN

# vLLM's older names of `structured_outputs`.
_OLD_NAMES = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
# Escaped characters are unchanged; a slash or a line break would end the literal.
_IN_LITERAL = re.compile(r"\\[\n\r]|\\.|/|[\n\r]")
_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
# Keys of `response_format` by its type, and the keys of `json_schema` in it.
_FORMAT_KEYS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
_JSON_SCHEMA_KEYS = ("name", "description", "schema", "strict")
# vLLM's options for white space in JSON.
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
_GBNF_RULE = re.compile(r"\A(?:\s|#[^\n]*\n)*[A-Za-z][\w-]*\s*::=")
_LINE = re.compile(r"\A[^:]*: at (\d+)\(\d+\): ")
_RULE = re.compile(r"\A(?:args?|json|TEXT|text)_(\d+).*")


class NamedSchema(NamedTuple):
    """Schema of a client, with its place in messages and its field."""

    place: str
    param: str
    schema: Any


@dataclass(frozen=True)
class Structure:
    """Structure that an answer must have."""

    grammar: str = ""
    param: str | None = None
    """Field that requested it."""
    rule: str = ""
    """The same as the right side of a Lark rule; "" for grammars of clients."""
    schemas: Mapping[str, NamedSchema] = field(default_factory=dict, compare=False)
    """Schemas of the client by the rule of the grammar that follows them; "" for a schema alone."""

    def refused(self, error: RequestError) -> RequestError:
        """Return the error of a grammar that the engine refuses, with its place in the body."""
        reason = str(error)
        rule = ""
        if at := _LINE.search(reason):
            line = self.grammar.split("\n")[int(at[1]) - 1]
            rule = _RULE.sub(r"args_\1", line.partition(":")[0])
        named = self.schemas.get(rule)
        if named is None or error.code is not None:
            return RequestError(f"{self.param}: {error}", self.param, error.code)
        return RequestError(f"{named.place}: {explained(reason, named.schema)}", named.param)


class Wish(NamedTuple):
    """Structure that a field of a body requests."""

    param: str
    kind: str
    """json, regex, choice or grammar."""
    value: Any


def structure_of(body: GenerationFields) -> Structure:
    """Return the structure that a body requests; raises RequestError for an invalid one."""
    wishes: list[Wish] = []
    if body.response_format is not None:
        wishes += _response_format_wishes(body.response_format)
    if body.structured_outputs is not None:
        wishes += _structured_outputs_wishes(body.structured_outputs)
    for name, kind in _OLD_NAMES.items():
        if getattr(body, name) is not None:
            wishes.append(Wish(name, kind, getattr(body, name)))
    if not wishes:
        return Structure()
    if len(wishes) > 1:
        first, second = wishes[0].param, wishes[1].param
        raise RequestError(f"{first} and {second}: ask for one structure only", second)
    param, kind, value = wishes[0]
    try:
        grammar, rule = _compile(param, kind, value)
        grammar.encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"{param}: half characters or too much nesting ({type(error).__name__})", param) from error
    if len(grammar) > LONGEST_GRAMMAR:
        raise RequestError(f"{param}: the grammar has {len(grammar)} characters, more than {LONGEST_GRAMMAR}", param)
    schemas = {}
    if kind == "json":
        schemas[""] = NamedSchema(param, param, _schema_of(value, param))
    return Structure(grammar, param, rule, schemas)


def _response_format_wishes(value: Any) -> list[Wish]:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        raise RequestError("response_format.type must be text, json_object or json_schema", "response_format")
    _refuse_odd(value, ("type", *_FORMAT_KEYS[kind]), "response_format")
    if kind == "text":
        return []
    if kind == "json_object":
        schema = value.get("schema")
        if schema is None:
            schema = {"type": "object"}
        return [Wish("response_format", "json", schema)]
    outer = value.get("json_schema")
    if not isinstance(outer, dict) or not isinstance(outer.get("schema"), dict):
        raise RequestError("response_format: json_schema.schema must hold the schema", "response_format")
    _refuse_odd(outer, _JSON_SCHEMA_KEYS, "response_format.json_schema")
    return [Wish("response_format", "json", outer["schema"])]


def _refuse_odd(value: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raise RequestError for an unknown key of an object."""
    if odd := next((key for key in value if key not in known and value[key] is not None), None):
        param = f"{where}.{odd}"
        raise RequestError(f"Unrecognized request argument supplied: {param}", param, UNKNOWN)


def _structured_outputs_wishes(value: Any) -> list[Wish]:
    param = "structured_outputs"
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object with json, regex, choice or grammar", param)
    kinds = [kind for kind in value if kind not in _OPTIONS and value[kind] is not None]
    for kind in kinds:
        if kind not in _OLD_NAMES.values():
            raise RequestError(f"{param}.{kind} is not supported; use json, regex, choice or grammar", param)
    wishes = [Wish(param, kind, value[kind]) for kind in kinds]
    return [wish._replace(value=_with_whitespace(wish, value)) for wish in wishes]


def _with_whitespace(wish: Wish, options: Mapping[str, Any]) -> Any:
    param = wish.param
    compact_option, pattern_option = _OPTIONS
    is_compact = options.get(compact_option)
    pattern = options.get(pattern_option)
    if is_compact is None and pattern is None:
        return wish.value
    if wish.kind != "json":
        raise RequestError(f"{param}: {' and '.join(_OPTIONS)} go with json only", param)
    if not isinstance(is_compact, bool | None) or not isinstance(pattern, str | None):
        message = f"{param}: {compact_option} must be true or false, {pattern_option} a regular expression"
        raise RequestError(message, param)
    schema = _schema_of(wish.value, param)
    if not isinstance(schema, dict):
        return schema
    space: Mapping[str, Any] = FLEXIBLE
    if is_compact:
        space = COMPACT
    elif pattern is not None:
        space = {"whitespace_pattern": pattern}
    return {**schema, "x-guidance": {**space, **schema.get("x-guidance", {})}}


def _compile(param: str, kind: str, value: Any) -> tuple[str, str]:
    """Return a grammar in llguidance's format, and as the right side of a rule."""
    if kind == "json":
        schema = compact(_schema_of(value, param))
        return json.dumps({"grammars": [{"json_schema": schema}]}), f"%json {json.dumps(schema)}"
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise RequestError(f"{param}: choice must be a list of strings that are not empty", param)
        value = "|".join(f"({re.escape(text)})" for text in value)
        kind = "regex"
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param}: {kind} must be a string that is not empty", param)
    if kind == "grammar":
        return _lark(param, value), ""
    literal = lark_literal(value)
    return f"start: {literal}", literal


def _schema_of(value: Any, param: str) -> dict[str, Any] | bool:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param}: the schema is not valid JSON ({error})", param) from error
    if not isinstance(value, dict | bool):
        raise RequestError(f"{param}: a schema must be an object", param)
    return value


def _lark(param: str, grammar: str) -> str:
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
    """Return a regular expression as a literal of Lark."""
    escaped = _IN_LITERAL.sub(lambda match: _ESCAPES.get(match[0], match[0]), regex)
    return f"/{escaped}/"
