"""LangChain's ChatAnthropic: an answer and a stream; needs langchain-anthropic."""

import os

from langchain_anthropic import ChatAnthropic

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

chat = ChatAnthropic(base_url=URL, api_key=KEY, model=MODEL, max_tokens=60)
print(chat.invoke(QUESTION).content)
print("".join(str(chunk.content) for chunk in chat.stream(QUESTION)))
