"""A stream that ends with its metrics: tokens per pass and the gain over plain decoding."""

from openai import OpenAI

with OpenAI() as client:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hi! What do you do on weekends?"}],
        max_tokens=60,
        stream=True,
        # Fields that OpenAI does not have go into extra_body.
        extra_body={"speculation": {"num_drafts": 4, "draft_length": 5}},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.model_extra and "metrics" in chunk.model_extra:  # the last chunk has them
            metrics = chunk.model_extra["metrics"]
            speculation = metrics["speculative_decoding"]
            print(f"\n{metrics['tokens_per_second']:.0f} tokens/s")
            print(f"{speculation['tokens_per_pass']:.2f} tokens per pass")
            print(f"histogram of accepted tokens: {speculation['acceptance_histogram']}")
            if speculation["speedup"] is not None:  # None before plain steps were measured
                print(f"{speculation['speedup']:.2f} times plain decoding")
