"""OpenAI's client: a forced call whose result is sent back; needs openai."""

import os
from typing import Any

import openai

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}

tool: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
messages: Any = [{"role": "user", "content": QUESTION}]
with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[tool], tool_choice="required", max_tokens=200
    )
    (call,) = (answer.choices[0].message.tool_calls or [])[:1]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    more = [*messages, answer.choices[0].message.model_dump(exclude_none=True), result]
    again = client.chat.completions.create(model=MODEL, messages=more, tools=[tool], max_tokens=60)
    print(again.choices[0].finish_reason)
