"""Both providers of LiteLLM; needs litellm."""

import os

import litellm

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

messages = [{"role": "user", "content": QUESTION}]
for model, base in ((f"openai/{MODEL}", f"{URL}/v1"), (f"anthropic/{MODEL}", URL)):
    answer = litellm.completion(model=model, api_base=base, api_key=KEY, messages=messages, max_tokens=60)
    print(answer.choices[0].message.content)
