"""A language model of DSPy; needs dspy."""

import os

import dspy

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

print(dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, max_tokens=60)(QUESTION))
