"""Random grammars: mutations of valid regular expressions, JSON schemas and Lark grammars."""

from __future__ import annotations

import random
from typing import Any

_REGEXES = [
    "(yes|no), [a-z]+", "[0-9]{3}-[a-f]{2}", "(a+)+b", r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}", "a{1,100}", "(?i:x|y)*z",
    r"[^\n]{0,80}\.", "((a|b)*c){2,9}", r"\p{L}+", "(.*a.{12}){3}",
]  # fmt: skip
_LARKS = [
    "start: /x+/ /x+/",
    'start: "a" "b"+ "c"',
    'start: expression\nexpression: NUMBER | expression "+" expression\nNUMBER: /[0-9]+/',
    'start: item ("," item)*\nitem: WORD | "(" start ")"\nWORD: /[a-z]+/',
    'start: s\ns: s s | "a" | ""',
    "start: A & ~B\nA: /[a-z]*/\nB: /.*e.*/",
    'start: %json {"type": "object"}',
    "start[max_tokens=5]: /(?s:.*)/ tail\ntail[lazy]: /.*end/",
]
_SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -1e19, "maximum": -1e19},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]},
    {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 2, "maxItems": 5},
    {"type": "string", "pattern": "^[a-z]{2,6}$", "minLength": 1, "maxLength": 9},
    {"anyOf": [{"type": "number", "multipleOf": 0.1}, {"type": "null"}, {"const": {"x": [1, 2]}}]},
    {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
    {"type": "string", "format": "date-time"},
    {"type": "object", "patternProperties": {"^k": {"type": "boolean"}}, "additionalProperties": False},
]
_PIECES = ["{0,100000}", "{999}", *'*+()|[]\\/"~&.^$\né\0']
_KEYWORDS = ("minimum", "maxItems", "minLength", "multipleOf", "maximum", "minItems", "pattern")
_NUMBERS: list[Any] = [0, -1, 1e19, -1e19, 1e308, 5e-324, 2**63, -(2**63), 100_000_000, 0.1, True, None, "x", [], {}]


def mutated_text(text: str, chance: random.Random) -> str:
    """Return a text with pieces inserted, removed, doubled or moved."""
    for _ in range(chance.randrange(1, 6)):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        text = chance.choice(
            [
                text[:at] + chance.choice(_PIECES) + text[at:],
                text[:at] + text[to:],
                text[:to] + text[at:to] * chance.choice([1, 2, 40]) + text[to:],
                text[to:] + text[:to],
            ]
        )[:4000]
    return text or "a"


def mutated_schema(value: Any, chance: random.Random) -> Any:
    """Return a schema with values, keywords or parts replaced."""
    if isinstance(value, dict):
        changed = {key: mutated_schema(part, chance) for key, part in value.items()}
        if chance.random() < 0.4:
            keyword = chance.choice(_KEYWORDS)
            changed[keyword] = chance.choice(_NUMBERS)
        if changed and chance.random() < 0.1:
            del changed[chance.choice(list(changed))]
        if chance.random() < 0.15:
            changed[chance.choice(["items", "not", "anyOf", "allOf", "properties"])] = chance.choice(_SCHEMAS)
        return changed
    if isinstance(value, list):
        return [mutated_schema(part, chance) for part in value] * chance.choice([1, 1, 1, 3])
    if isinstance(value, str):
        return mutated_text(value, chance) if chance.random() < 0.1 else value
    return chance.choice(_NUMBERS) if chance.random() < 0.3 else value


def strange_grammar(chance: random.Random) -> dict[str, Any]:
    """Return random `structured_outputs`; a few are valid."""
    kind = chance.choice(["regex", "grammar", "json"])
    if kind == "json":
        return {kind: mutated_schema(chance.choice(_SCHEMAS), chance)}
    text = chance.choice(_REGEXES if kind == "regex" else _LARKS)
    return {kind: mutated_text(text, chance) if chance.random() < 0.95 else text}
