"""OpenAI's client: whole and streamed answers, and legacy completions; needs openai."""

import os
from typing import Any

import openai

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:
    messages: Any = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=60)
    print(whole.choices[0].message.content)
    stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=60, stream=True)
    print("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))
    print(client.completions.create(model=MODEL, prompt="Once", max_tokens=60).choices[0].text)
