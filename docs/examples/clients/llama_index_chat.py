"""LlamaIndex: a chat and a stream; needs llama-index-llms-openai-like."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

URL = os.environ.get("POLYDRAFT_URL", "http://localhost:8000")
MODEL = os.environ.get("POLYDRAFT_MODEL", "polydraft-demo")
KEY = os.environ.get("POLYDRAFT_API_KEY", "none")
QUESTION = "What is the weather in Paris?"

llm = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=60, is_chat_model=True)
print(llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content)
print([part.delta for part in llm.stream_complete(QUESTION)])
