"""A schema of structured output, and a check of its answers by hand."""

from __future__ import annotations

import json
import re
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["big", "small"]},
        "done": {"type": "boolean"},
    },
    "required": ["name", "count", "kind", "done"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def is_valid(text: str) -> bool:
    """Whether a text is JSON of the schema, checked by hand."""
    thing = json.loads(text)
    return (
        set(thing) == set(SCHEMA["required"])
        and re.fullmatch("[a-z]{2,6}", thing["name"]) is not None
        and type(thing["count"]) is int
        and 0 <= thing["count"] <= 99
        and thing["kind"] in ("big", "small")
        and type(thing["done"]) is bool
    )
