"""Grammars of a call's arguments that are literals (`literal_calls.py`).

A string of Gemma 4 stands between marks, and no mark is inside it. Every other value is JSON, which
the readers of both formats take for a literal.

Not for: the rest of a call (`call_grammars.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from server.text.literal_calls import QUOTE
from server.text.schemas import compact
from server.text.structured import lark_literal
from server.text.text_values import CannotSplit, Schema, alternatives, merged, with_root

LITERAL_GRAMMARS: Mapping[str, tuple[str, str]] = {
    "gemma4": (":", ","),
    "lfm2": ("=", ", "),
    "pythonic": ("=", ", "),
}
"""Text after a key, and between arguments, by format."""
_KEY = r"[a-zA-Z_][a-zA-Z0-9_]{0,99}"
_ANY: Schema = {"type": ["number", "boolean", "null", "object", "array"]}


class LiteralArguments:
    """Rules of one function's arguments."""

    def __init__(self, form: str, with_marks: Callable[[str], str], quote_token: str, number: int) -> None:
        """quote_token: the special token around strings, in Lark, if the mark is one."""
        self._assign, self._comma = LITERAL_GRAMMARS[form]
        self._has_marks = form == "gemma4"
        self._with_marks = with_marks
        self._quote_token = quote_token
        self._number = number
        self._rules: list[str] = []

    def unrestricted(self) -> list[str]:
        """Return the rules for arguments with any names and values."""
        value = self._value(f"{self._number}", {}, {})
        pair = f'{lark_literal(_KEY)} "{self._assign}" {value}'
        return [f'args_{self._number}: (({pair}) ("{self._comma}" {pair})*)?', *self._rules]

    def following(self, schema: Schema) -> list[str]:
        """Return the rules for arguments that follow a schema; raises CannotSplit."""
        root = merged(schema, schema)
        properties = root.get("properties") or {}
        required = root.get("required") or []
        if odd := next((key for key in [*properties, *required] if not re.fullmatch(_KEY, key)), None):
            raise CannotSplit(f"the name {odd!r}")
        if unlisted := next((key for key in required if key not in properties), None):
            raise CannotSplit(f"{unlisted!r}, which is required and is not a property")
        first = later = '""'
        # From the last argument on: with and without an argument before.
        for place, (key, key_schema) in reversed([*enumerate(properties.items())]):
            name = f"{self._number}_{place}"
            value = self._value(name, key_schema, schema)
            self._rules.append(f'arg_{name}: "{key}{self._assign}" {value}')
            with_first = f"arg_{name} {later}"
            with_later = f'"{self._comma}" arg_{name} {later}'
            if key not in required:
                with_first, with_later = f"({with_first} | {first})", f"({with_later} | {later})"
            self._rules.append(f"first_{name}: {with_first}")
            self._rules.append(f"later_{name}: {with_later}")
            first, later = f"first_{name}", f"later_{name}"
        return [f"args_{self._number}: {first}", *self._rules]

    def _value(self, name: str, schema: Schema, root: Schema) -> str:
        """Return the right side of a rule for a value; raises CannotSplit."""
        if not self._has_marks:
            return self._json(name, [schema], root)
        if not schema or not isinstance(schema, Mapping):
            return f"({self._string(f'text_{name}', ['(?s:.*)'])} | {self._json(name, [_ANY], root)})"
        values = alternatives(schema, root)
        texts = [re.escape(one) for one in values.choices if isinstance(one, str) and QUOTE not in one]
        patterns = [*values.strings, *([["|".join(texts)]] if texts else [])]
        sides = [self._string(f"text_{name}_{place}", one) for place, one in enumerate(patterns)]
        others = [*values.others, *({"const": one} for one in values.choices if not isinstance(one, str))]
        if others:
            sides.append(self._json(name, others, root))
        if not sides:
            raise CannotSplit("none of its values")
        return f"({' | '.join(sides)})"

    def _string(self, name: str, patterns: Sequence[str]) -> str:
        """Add a rule for strings that match all patterns, with the mark that ends them."""
        quote = re.escape(QUOTE)
        begin = self._with_marks(f'"{QUOTE}"')
        if not self._quote_token:
            parts = [lark_literal(f"(?:{pattern}){quote}") for pattern in patterns]
            self._rules.append(f"{name}[lazy]: {' & '.join(parts)}")
            return f"{begin} {name}"
        parts = [lark_literal(f"(?:{pattern})") for pattern in patterns]
        self._rules.append(f"{name.upper()}: {' & '.join([*parts, '~' + lark_literal(f'(?s:.*){quote}(?s:.*)')])}")
        return f"{begin} {name.upper()} {self._quote_token}"

    def _json(self, name: str, schemas: Sequence[Schema], root: Schema) -> str:
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        whole = with_root(schema, root) if isinstance(schema, Mapping) else schema
        if isinstance(whole, dict) and "x-guidance" in root:
            whole["x-guidance"] = root["x-guidance"]
        self._rules.append(f"json_{name}: %json {json.dumps(compact(whole))}")
        return f"json_{name}"
