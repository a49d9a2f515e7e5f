"""A chat generator of Haystack; needs haystack-ai."""

import os

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

generator = OpenAIChatGenerator(
    api_key=Secret.from_token(KEY),
    model=MODEL,
    api_base_url=f"{URL}/v1",
    generation_kwargs={"max_tokens": 60},
)
print(generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text)
