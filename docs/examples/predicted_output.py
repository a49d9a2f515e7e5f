"""Predicted output: an expected text is a draft, so that the same answer takes fewer steps."""

from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionPredictionContentParam

with OpenAI() as client:
    model = client.models.list().data[0].id

    def ask(prediction: str | None) -> tuple[str, dict[str, Any]]:
        """Return the answer's text and its speculation metrics."""
        expected: ChatCompletionPredictionContentParam = {"type": "content", "content": prediction or ""}
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Which coffee do you have?"}],
            max_tokens=60,
            temperature=0,
            **({"prediction": expected} if prediction else {}),
        )
        assert answer.model_extra is not None
        return answer.choices[0].message.content or "", answer.model_extra["metrics"]["speculative_decoding"]

    text, without = ask(None)
    again, with_prediction = ask(text)
    print(text)
    print("the same text:", again == text)
    print("steps without and with the prediction:", without["num_spec_steps"], with_prediction["num_spec_steps"])
    print("accepted from the prediction:", with_prediction["drafters"]["prediction"]["num_accepted_tokens"])
