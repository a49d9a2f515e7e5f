"""LangChain's ChatOpenAI, whole and streamed; needs langchain-openai.

OPENAI_BASE_URL and OPENAI_API_KEY name the daemon, for example http://localhost:8000/v1 and any key.
"""

from langchain_openai import ChatOpenAI
from openai import OpenAI

with OpenAI() as client:
    model = client.models.list().data[0].id

# Fields that OpenAI does not have go into extra_body.
chat = ChatOpenAI(model=model, max_tokens=60, extra_body={"speculation": {"num_drafts": 4, "draft_length": 5}})

answer = chat.invoke("I would like to book a table.")
print(answer.content)
assert answer.usage_metadata is not None
print(answer.usage_metadata["output_tokens"], "tokens")

for chunk in chat.stream([("user", "I would like to book a table."), ("ai", answer.content), ("user", "For two.")]):
    print(chunk.content, end="", flush=True)
print()
