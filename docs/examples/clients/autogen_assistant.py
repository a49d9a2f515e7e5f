"""An assistant of AutoGen; needs autogen-agentchat and autogen-ext[openai]."""

import asyncio
import os
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

info: Any = {
    "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
}  # fmt: skip
client = OpenAIChatCompletionClient(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, model_info=info, max_tokens=60)
print(asyncio.run(AssistantAgent("a", model_client=client).run(task=QUESTION)).messages)
