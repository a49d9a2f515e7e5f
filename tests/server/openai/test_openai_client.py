"""The official OpenAI client: shapes, usage, seeds, stops, errors."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.server.conftest import KEYS
from tests.server.daemon_process import MODEL, Daemon
from tests.server.tiny_models import BOS, MAX_POSITIONS

MESSAGES: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story."}]},
]
# Random models end an answer now and then; tests about lengths do not want that.
ENDLESS = {"ignore_eos": True}


def chat_stream(client: openai.OpenAI, **more: Any) -> list[ChatCompletionChunk]:
    """All chunks of a streamed chat."""
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_body=ENDLESS, **more
    ) as stream:
        return list(stream)


def chat_text(client: openai.OpenAI, **more: Any) -> str:
    """The text of a whole chat answer."""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=ENDLESS, **more)
    text = answer.choices[0].message.content
    assert isinstance(text, str)
    return text


def complete(client: openai.OpenAI, prompt: Any, **more: Any) -> Completion:
    """A whole completion."""
    answer: Completion = client.completions.create(model=MODEL, prompt=prompt, extra_body=ENDLESS, **more)
    return answer


def test_chat_answers_whole(openai_client: openai.OpenAI) -> None:
    """A chat has an id, one message with its role, and a usage that adds up."""
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, seed=1, extra_body=ENDLESS
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert choice.index == 0
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert {"logprobs", "message"} <= choice.model_fields_set
    assert "refusal" in choice.message.model_fields_set
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_begins_with_the_role_and_ends_with_the_reason(openai_client: openai.OpenAI) -> None:
    """Role first, then text, then an empty delta with the finish reason; one id for all."""
    chunks = chat_stream(openai_client, max_tokens=12, seed=1)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first, *between, last = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert all(choice.delta.content and choice.delta.role is None for choice in between)
    assert all(choice.finish_reason is None for choice in between)
    assert last.delta.model_dump(exclude_none=True) == {}
    assert last.finish_reason == "length"
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_include_usage_adds_one_chunk_without_choices(openai_client: openai.OpenAI) -> None:
    """Every other chunk has `usage: null`."""
    chunks = chat_stream(openai_client, max_tokens=12, seed=1, stream_options={"include_usage": True})
    *before, last = chunks
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in before)
    assert all(chunk.choices for chunk in before)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_continuous_usage_counts_up_to_the_last_chunk(openai_client: openai.OpenAI) -> None:
    """With `continuous_usage_stats` every chunk carries the usage so far."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat_stream(openai_client, max_tokens=12, seed=1, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 12)


def test_a_seed_gives_the_same_text_whole_and_streamed(openai_client: openai.OpenAI) -> None:
    """The same seed gives the same answer again and as a stream; another seed gives another."""
    whole = chat_text(openai_client, max_tokens=32, seed=7)
    assert chat_text(openai_client, max_tokens=32, seed=7) == whole
    chunks = chat_stream(openai_client, max_tokens=32, seed=7)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chat_text(openai_client, max_tokens=32, seed=8) != whole


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_length_limit_work(openai_client: openai.OpenAI, field: str) -> None:
    """`max_tokens` and `max_completion_tokens` both end an answer."""
    answer = openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={**ENDLESS, field: 3})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_null_is_the_same_as_left_out(openai_client: openai.OpenAI) -> None:
    """Clients send null for what a person did not set; OpenAI's schema allows it."""
    fields = ("max_tokens", "n", "stream", "stop", "temperature", "top_p", "user", "logit_bias", "stream_options")
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={**dict.fromkeys(fields), "max_completion_tokens": 3}
    )
    assert answer.choices[0].message.role == "assistant"


def test_several_choices_differ_and_stream_as_they_are_whole(openai_client: openai.OpenAI) -> None:
    """`n=3` gives three texts, the same in a stream."""
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, max_tokens=10, seed=3, extra_body=ENDLESS
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    whole = {choice.index: choice.message.content for choice in answer.choices}
    assert len(set(whole.values())) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    streamed = dict.fromkeys(range(3), "")
    reasons: dict[int, str] = {}
    for chunk in chat_stream(openai_client, n=3, max_tokens=10, seed=3):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert streamed == whole
    assert reasons == dict.fromkeys(range(3), "length")


def test_a_completion_takes_text_or_tokens(openai_client: openai.OpenAI) -> None:
    """A string, a list, token ids and a list of them give one answer."""
    from server.text.tokenizer import Tokenizer
    from tests.server.tiny_models import TOKENIZER

    tokenizer = Tokenizer(str(TOKENIZER))
    tokens = tokenizer.encode("Once upon a time")
    tokenizer.close()
    prompts: list[Any] = ["Once upon a time", ["Once upon a time"], tokens, [tokens]]
    answers = [complete(openai_client, prompt, max_tokens=8, seed=5) for prompt in prompts]
    assert len({answer.choices[0].text for answer in answers}) == 1
    for answer in answers:
        assert answer.id.startswith("cmpl-")
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 8)


def test_several_prompts_and_choices_are_numbered_in_order(openai_client: openai.OpenAI) -> None:
    """Choice `p * n + i` answers prompt p; each prompt is counted once."""
    answer = complete(openai_client, [[BOS, 5, 6], [BOS, 7]], n=2, max_tokens=6, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert texts[2] == complete(openai_client, [BOS, 7], max_tokens=6, temperature=0).choices[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)


def test_a_completion_is_sixteen_tokens_long_by_default(openai_client: openai.OpenAI) -> None:
    """OpenAI's default of `max_tokens` for completions."""
    answer = complete(openai_client, "Once")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.slow
def test_the_longest_answer_fills_the_context(openai_client: openai.OpenAI) -> None:
    """Prompt and answer may have the model's length together, and not one token more."""
    prompt = [BOS] + [9] * (MAX_POSITIONS - 4)
    for max_tokens in (3, 4):
        answer = complete(openai_client, prompt, max_tokens=max_tokens)
        assert answer.usage is not None
        assert answer.usage.total_tokens == MAX_POSITIONS


def test_models_are_listed_and_retrieved(openai_client: openai.OpenAI) -> None:
    """The served model is listed and found by name; another is not found."""
    (model,) = openai_client.models.list().data
    assert model.id == MODEL
    assert model.object == "model"
    assert openai_client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.models.retrieve("org/another")
    assert caught.value.code == "model_not_found"


def test_an_unknown_model_is_not_found(openai_client: openai.OpenAI) -> None:
    """A request for another model raises NotFoundError, and names the field."""
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.chat.completions.create(model="another", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_bad_value_is_a_bad_request(openai_client: openai.OpenAI) -> None:
    """A value out of range raises BadRequestError, also where a stream was asked for."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            openai_client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3, stream=stream)
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", "temperature")


def test_a_wrong_key_is_an_authentication_error(one_seat: Daemon) -> None:
    """Each of several keys works; another raises AuthenticationError."""
    for key in KEYS:
        with openai.OpenAI(base_url=f"{one_seat.url}/v1", api_key=key, max_retries=0) as client:
            assert client.models.list().data[0].id == MODEL
    with (
        openai.OpenAI(base_url=f"{one_seat.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_the_last_message_can_be_continued(openai_client: openai.OpenAI) -> None:
    """The prompt ends within the assistant's message."""
    messages = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "Once upon a"}]

    def prompt_tokens(**more: Any) -> int:
        answer = openai_client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=4,
            extra_body=more,  # type: ignore[arg-type]
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens(continue_final_message=True) == prompt_tokens() - 2
    assert prompt_tokens(chat_template_kwargs={"any": 1}) == prompt_tokens()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"chat_template_kwargs": {"tokenize": True}, "messages": [{"role": "user", "content": "x"}]}, None),
    ],
)
def test_conversations_that_cannot_be_continued(
    openai_client: openai.OpenAI, fields: dict[str, Any], param: str | None
) -> None:
    """Refused by name."""
    messages = fields.pop("messages")
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model=MODEL, messages=messages, extra_body=fields)
    assert caught.value.param == (param or "chat_template_kwargs")
