"""OpenAI's client: a whole answer, then a conversation as a stream.

OPENAI_BASE_URL and OPENAI_API_KEY name the daemon, for example http://localhost:8000/v1 and any
key.
"""

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

with OpenAI() as client:
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "I would like to book a table."}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60, seed=2)
    print(answer.choices[0].message.content)

    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "For two, in Oakland, at seven."},
    ]
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=60, seed=2, stream=True)
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
