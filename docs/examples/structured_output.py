"""Structured output: the answer follows a JSON schema, at any temperature and with any draft."""

import json

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "guests": {"type": "integer", "minimum": 1, "maximum": 12},
        "outside": {"type": "boolean"},
    },
    "required": ["name", "guests", "outside"],
    "additionalProperties": False,
}

with OpenAI() as client:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Book a table for two outside, please."}],
        max_tokens=200,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "booking", "schema": SCHEMA, "strict": True}},
    )
    booking = json.loads(answer.choices[0].message.content or "")
    print(booking)
    print(f"a table for {booking['guests']}, {'outside' if booking['outside'] else 'inside'}")
