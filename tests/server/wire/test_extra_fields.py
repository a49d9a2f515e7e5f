"""Fields that are refused, ask for nothing, or are other servers'."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from engine.api import RequestError
from server.text.tokenizer import Tokenizer
from server.wire.fields import ChatRequest, CompletionRequest
from server.wire.unsupported_fields import refuse_unsupported
from tests.server.event_stream import EventStream
from tests.server.good_bodies import BODIES, CHAT, COMPLETIONS, RESPONSES, error_of, post, send
from tests.server.tiny_models import MAX_POSITIONS, TOKENIZER, VOCAB_SIZE


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"speculation": {"num_draft": 2}}, "speculation.num_draft"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"prediction": {"type": "content", "content": "x", "weight": 1}}, "prediction.weight"),
    ],
)
def test_an_unknown_name_in_an_object_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """A typo there would change what is measured without a word."""
    for path in (CHAT, COMPLETIONS):
        error = error_of(send(http, path, fields), 400)
        assert (error["param"], error["code"]) == (param, "unknown_parameter")
        assert param in error["message"]


def test_an_unknown_name_in_the_text_of_a_response_is_refused(http: httpx.Client) -> None:
    error = error_of(post(http, RESPONSES, {"text": {"fromat": {"type": "text"}}}), 400)
    assert (error["param"], error["code"]) == ("text.fromat", "unknown_parameter")


REFUSED: dict[str, Any] = {
    "moderation": {"model": "x"},
    "context_management": [{"type": "compaction"}],
    "best_of": True,
    "spaces_between_special_tokens": False,
    "return_tokens_as_token_ids": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_known_field_that_is_not_served_is_refused(http: httpx.Client, name: str) -> None:
    for path in (CHAT, COMPLETIONS):
        error = error_of(send(http, path, {name: REFUSED[name]}), 400)
        assert (error["param"], error["code"]) == (name, "unsupported_value")
    assert error_of(post(http, RESPONSES, {name: REFUSED[name]}), 400)["param"] == name


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"add_special_tokens": True},
        {"include_reasoning": False},
        {"documents": [{"title": "x", "text": "y"}]},
        {"add_generation_prompt": True, "continue_final_message": True},
    ],
)
def test_fields_that_a_chat_does_not_serve_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert error_of(send(http, CHAT, {**fields, "messages": messages}), 400)["param"] == next(iter(fields))


@pytest.mark.parametrize("name", ["audio", "function_call"])
def test_fields_that_a_message_does_not_serve_are_refused(http: httpx.Client, name: str) -> None:
    """Clients send back what other servers returned them."""
    message = {"role": "assistant", "content": "x", "annotations": [], "refusal": None}
    assert send(http, CHAT, {"messages": [message]}).status_code == 200
    error = error_of(send(http, CHAT, {"messages": [{**message, name: {"id": "x"}}]}), 400)
    assert error["param"] == f"messages.0.{name}"


# What clients send without being asked, and what changes nothing.
OPENAI = {
    "user": "someone",
    "metadata": {"a": "b"},
    "store": False,
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "auto"},
    "service_tier": "auto",
}
VLLM = {
    "best_of": 1,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": True,
    "top_k": -1,
    "min_p": 0.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "stop": None,
}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *[(path, OPENAI) for path in (CHAT, COMPLETIONS, RESPONSES)],
        *[(path, VLLM) for path in (CHAT, COMPLETIONS)],
        *[(path, {**USAGE, "max_completion_tokens": 2, "ignore_eos": True}) for path in (CHAT, COMPLETIONS)],
        (CHAT, {"verbosity": "medium", "modalities": ["text"], "parallel_tool_calls": True, "logprobs": False}),
        (CHAT, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
        (CHAT, {"echo": False, "add_special_tokens": False, "include_reasoning": True, "documents": []}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True}),
        (COMPLETIONS, {"suffix": "", "add_special_tokens": True, "logprobs": None, "echo": False}),
        (RESPONSES, {"truncation": "disabled", "include": [], "stream_options": {"include_obfuscation": False}}),
        (RESPONSES, {"store": False, "include": [], "prompt_cache_key": "x", "client_metadata": {"a": "b"}}),
        (RESPONSES, {"include": ["web_search_call.results"], "max_tool_calls": 3, "truncation": "disabled"}),
        (RESPONSES, {"service_tier": "default", "text": {"verbosity": "medium"}, "background": False}),
    ],
)
def test_bodies_of_known_clients_are_accepted(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    """The official client, lm-eval, vLLM's and SGLang's benches, guidellm and aiperf."""
    response = post(http, path, fields)
    assert response.status_code == 200, response.text


@pytest.mark.slow
def test_a_prompt_is_truncated_on_request(http: httpx.Client) -> None:
    """To its last tokens, or its first; -1 leaves room for the answer."""

    def usage(**fields: Any) -> int:
        answer = post(http, COMPLETIONS, {"prompt": list(range(5, 25)), "echo": True, "max_tokens": 1, **fields})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    def kept(**fields: Any) -> list[int]:
        answer = post(http, COMPLETIONS, {"prompt": list(range(5, 25)), "return_token_ids": True, **fields})
        found: list[int] = answer.json()["choices"][0]["prompt_token_ids"]
        return found

    assert kept(truncate_prompt_tokens=3) == [22, 23, 24]
    assert kept(truncate_prompt_tokens=3, truncation_side="right") == [5, 6, 7]
    assert kept(truncate_prompt_tokens=30) == list(range(5, 25))
    assert usage(truncate_prompt_tokens=7) == 7
    long = {"prompt": [5] * (MAX_POSITIONS + 50), "max_tokens": 4}
    assert usage(**long, truncate_prompt_tokens=-1) == MAX_POSITIONS - 4
    for wrong in (0, MAX_POSITIONS + 1):
        assert error_of(post(http, COMPLETIONS, {"truncate_prompt_tokens": wrong}), 400)["param"] == (
            "truncate_prompt_tokens"
        )
    assert error_of(post(http, COMPLETIONS, {"truncation_side": "right"}), 400)["param"] == "truncation_side"
    messages = [{"role": "user", "content": "word " * MAX_POSITIONS}]
    chat = post(http, CHAT, {"messages": messages, "truncate_prompt_tokens": 9}).json()
    assert chat["usage"]["prompt_tokens"] == 9


def test_the_opening_of_an_answer_can_be_left_out(http: httpx.Client) -> None:
    """`add_generation_prompt: false` ends the prompt with the last message."""

    def prompt(**fields: Any) -> list[int]:
        found: list[int] = post(http, CHAT, {"return_token_ids": True, **fields}).json()["prompt_token_ids"]
        return found

    shorter, usual = prompt(add_generation_prompt=False), prompt()
    assert len(shorter) < len(usual)
    assert usual[: len(shorter)] == shorter


def test_token_ids_are_reported_in_vllms_places(http: httpx.Client) -> None:
    """Whole: with each choice; the prompt's once for a chat, with each choice of a completion."""
    asked = {"return_token_ids": True, "n": 2, "max_tokens": 6, "seed": 1, "ignore_eos": True}
    chat = post(http, CHAT, asked).json()
    completion = post(http, COMPLETIONS, {**asked, "prompt": [[5, 6], [7]]}).json()
    assert [len(choice["token_ids"]) for choice in (*chat["choices"], *completion["choices"])] == [6] * 6
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert [choice["prompt_token_ids"] for choice in completion["choices"]] == [[5, 6], [5, 6], [7], [7]]
    text = http.post("/detokenize", json={"tokens": completion["choices"][0]["token_ids"]}).json()["prompt"]
    assert text == completion["choices"][0]["text"]
    assert all("token_ids" not in choice for choice in post(http, CHAT, {}).json()["choices"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_token_ids_add_up_to_the_whole(http: httpx.Client, path: str) -> None:
    """Also of steps whose text is held back; the prompt's with the first chunk."""
    asked = {"return_token_ids": True, "n": 2, "max_tokens": 20, "seed": 1, "ignore_eos": True}
    whole = post(http, path, asked).json()
    with http.stream("POST", path, json={**BODIES[path], **asked, "stream": True}) as response:
        chunks = EventStream(response).read()
    for choice in whole["choices"]:
        choice_chunks = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [token for one in choice_chunks for token in one.get("token_ids", [])] == choice["token_ids"]
        prompts = [one["prompt_token_ids"] for one in choice_chunks if "prompt_token_ids" in one]
        assert prompts == ([] if path == CHAT else [choice["prompt_token_ids"]])
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert prompts == ([whole["prompt_token_ids"]] if path == CHAT else [])


def test_special_tokens_can_be_left_out_of_a_completion(http: httpx.Client) -> None:
    usual, bare = (
        post(http, COMPLETIONS, {"return_token_ids": True, **more}).json()["choices"][0]["prompt_token_ids"]
        for more in ({}, {"add_special_tokens": False})
    )
    assert bare == http.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False}).json()["tokens"]
    assert usual == http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]


def test_documents_reach_a_template_that_has_a_place_for_them() -> None:
    """And are refused by one that has none, instead of being dropped."""
    place = "{% for document in documents or [] %}{{ document.text }} {% endfor %}{{ messages[0].content }}"
    documents = [{"title": "x", "text": "coffee"}]
    messages = [{"role": "user", "content": "hello"}]
    tokenizer = Tokenizer(str(TOKENIZER), place)
    found = asyncio.run(tokenizer.run_chat(messages, documents=documents))
    assert tokenizer.decode(found).replace(" ", "") == "coffeehello"
    assert all(0 <= token < VOCAB_SIZE for token in found)
    with pytest.raises(RequestError, match="no place for documents") as caught:
        asyncio.run(Tokenizer(str(TOKENIZER)).run_chat(messages, documents=documents))
    assert caught.value.param == "documents"


def test_every_mark_of_a_neutral_value_is_looked_at() -> None:
    """Whatever field is marked, on whichever endpoint."""
    body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], "audio": {}})
    with pytest.raises(RequestError, match="audio is not supported by this server; leave it out"):
        refuse_unsupported(body)
    fields = {
        "chat_template_kwargs": "{} is",
        "return_tokens_as_token_ids": "false is",
        "spaces_between_special_tokens": "true is",
    }
    for name, served in fields.items():
        body = CompletionRequest.model_validate({"model": "m", "prompt": "x", name: "flex"})
        with pytest.raises(
            RequestError, match=f"^{name} is not supported by this server \\(only {served} accepted\\); leave"
        ):
            refuse_unsupported(body)
