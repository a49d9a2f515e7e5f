"""LangChain's ChatOpenAI: an answer, a stream, a schema, a tool call; needs langchain-openai.

OPENAI_BASE_URL and OPENAI_API_KEY name the daemon, for example http://localhost:8000/v1 and any
key.
"""

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Booking(BaseModel):
    """A table in a restaurant."""

    name: str = Field(max_length=12)
    guests: int = Field(ge=1, le=12)


# Fields that OpenAI does not have go into extra_body.
chat = ChatOpenAI(
    model="polydraft-demo", max_tokens=200, extra_body={"speculation": {"num_drafts": 4, "draft_length": 5}}
)

answer = chat.invoke("I would like to book a table.")
print(answer.content)

for chunk in chat.stream([("user", "I would like to book a table."), ("ai", answer.content), ("user", "For two.")]):
    print(chunk.content, end="", flush=True)
print()

print(chat.with_structured_output(Booking).invoke("A table for two, please."))

called = chat.bind_tools([Booking], tool_choice="any").invoke("A table for two, please.")
print(called.tool_calls[0]["name"], called.tool_calls[0]["args"])
