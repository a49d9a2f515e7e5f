"""An answer by a pydantic model, with Instructor; needs instructor."""

import os
from typing import Any

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)


client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
messages: Any = [{"role": "user", "content": QUESTION}]
print(client.create(model=MODEL, response_model=Place, messages=messages, max_tokens=100).city)
