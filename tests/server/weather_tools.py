"""Function tools, and a check of the calls of them."""

from __future__ import annotations

import json
from typing import Any

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
USER = {"role": "user", "content": "What is the weather in Paris?"}


def check_call(name: str, arguments: str) -> None:
    """Arguments follow the function's schema, checked by hand."""
    values = json.loads(arguments)
    if name == "weather":
        assert set(values) == {"city", "unit"}
        assert values["unit"] in "CF"
        assert values["city"][0].isupper()
    else:
        assert (name, values) == ("clock", {})
