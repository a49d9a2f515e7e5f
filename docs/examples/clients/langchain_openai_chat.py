"""LangChain's ChatOpenAI: an answer and a stream; needs langchain-openai."""

import os

from langchain_openai import ChatOpenAI

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

chat = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=60)
print(chat.invoke(QUESTION).content)
print("".join(str(chunk.content) for chunk in chat.stream(QUESTION)))
