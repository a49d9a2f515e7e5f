"""From `response_format` and `structured_outputs` to a grammar that the engine follows.

Not for: masks (`engine.sampling.grammar`).
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from engine.api import RequestError
from server.protocol import GenerationFields

# vLLM's older names of the kinds of `structured_outputs`.
_OLD_NAMES = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
LONGEST_GRAMMAR = 1 << 16
"""Characters."""


def grammar_of(body: GenerationFields) -> str:
    """The grammar a body asks for, "" where it asks for none; raises RequestError for one that is not valid.

    May take a while for a large schema: not for the event loop.
    """
    wanted: list[tuple[str, str, Any]] = []
    if body.response_format is not None:
        wanted += _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        wanted += _of_kinds(body.structured_outputs, "structured_outputs")
    for name, kind in _OLD_NAMES.items():
        if getattr(body, name) is not None:
            wanted.append((name, kind, getattr(body, name)))
    if not wanted:
        return ""
    if len(wanted) > 1:
        raise RequestError(f"{wanted[0][0]} and {wanted[1][0]}: ask for one structure only", wanted[1][0])
    param, kind, value = wanted[0]
    try:
        grammar = _compile(param, kind, value)
        grammar.encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise RequestError(f"{param}: half characters or too much nesting ({type(error).__name__})", param) from error
    if len(grammar) > LONGEST_GRAMMAR:
        raise RequestError(f"{param}: the grammar has {len(grammar)} characters, more than {LONGEST_GRAMMAR}", param)
    if fault := LLMatcher.validate_grammar(grammar, None):
        raise RequestError(f"{param}: {' '.join(fault.split())[:400]}", param)
    return grammar


def _of_response_format(value: Any) -> list[tuple[str, str, Any]]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json", {"type": "object"})]
    if kind == "json_schema":
        outer = value.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, dict) else None
        if not isinstance(schema, dict):
            raise RequestError("response_format: json_schema.schema must hold the schema", "response_format")
        return [("response_format", "json", schema)]
    raise RequestError("response_format.type must be text, json_object or json_schema", "response_format")


def _of_kinds(value: Any, param: str) -> list[tuple[str, str, Any]]:
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object with json, regex, choice or grammar", param)
    kinds = [(param, kind, value[kind]) for kind in value if value[kind] is not None]
    for _, kind, _ in kinds:
        if kind not in _OLD_NAMES.values():
            raise RequestError(f"{param}.{kind} is not supported; use json, regex, choice or grammar", param)
    return kinds


def _compile(param: str, kind: str, value: Any) -> str:
    """The grammar of one kind, as llguidance reads it."""
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise RequestError(f"{param}: the schema is not valid JSON ({error})", param) from error
        if not isinstance(value, dict | bool):
            raise RequestError(f"{param}: a schema must be an object", param)
        return str(LLMatcher.grammar_from_json_schema(json.dumps(value)))
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            raise RequestError(f"{param}: choice must be a list of strings that are not empty", param)
        return str(LLMatcher.grammar_from_regex("|".join(f"({re.escape(one)})" for one in value)))
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param}: {kind} must be a string that is not empty", param)
    return str(LLMatcher.grammar_from_regex(value) if kind == "regex" else LLMatcher.grammar_from_lark(value))
