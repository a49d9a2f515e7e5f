"""Anthropic's client: answers, a stream, a forced tool, counted tokens; needs anthropic."""

import os
from typing import Any

import anthropic

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

messages: Any = [{"role": "user", "content": QUESTION}]
with anthropic.Anthropic(base_url=URL, api_key=KEY) as client:
    print(client.messages.create(model=MODEL, messages=messages, max_tokens=60).content)
    with client.messages.stream(model=MODEL, messages=messages, max_tokens=60) as stream:
        print(stream.get_final_text())
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = client.messages.create(model=MODEL, messages=messages, max_tokens=200, tools=tools, tool_choice=choice)
    print(called.stop_reason)
    print(client.messages.count_tokens(model=MODEL, messages=messages).input_tokens)
