"""OpenAI's Agents SDK: an agent that must call its tool; needs openai-agents."""

import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

set_tracing_disabled(True)


@function_tool
def weather() -> str:
    """The weather."""
    return "sunny"


client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
agent = Agent(
    name="a",
    tools=[weather],
    model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
    model_settings=ModelSettings(max_tokens=200, tool_choice="required"),
)
print(Runner.run_sync(agent, QUESTION).final_output)
