"""OpenAI's client: a stream of the Responses API; needs openai."""

import os

import openai

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
with client, client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=60) as stream:
    kinds = [event.type for event in stream]
    print(kinds[-1], kinds.count("response.output_text.delta"))
