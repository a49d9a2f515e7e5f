"""A model of smolagents, called as its agents do; needs smolagents."""

import os

from smolagents import OpenAIServerModel

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=60)
print(model([{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]).content)
