"""Bug reports of other servers, tried here, with the right value of each.

Every test names its reports by project and number. A report is worth a test here if it can be tried
on the shared daemon or in the process.
"""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from server.text.call_formats import HERMES
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server.completions import CALL, OFF, SHAPES, answer_of
from tests.server.daemon_process import MODEL
from tests.server.event_stream import open_stream, texts
from tests.server.good_bodies import CHAT, COMPLETIONS

SPECULATIVE = [name for name in SHAPES if name != "off"]
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
TOOLS = tuple(Tool(type="function", function=Function(name=name)) for name in ("weather", "add"))
CONVERSATION: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "seed": 3, "ignore_eos": True}


def choice_of(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The only choice of a completion."""
    (choice,) = answer_of(http, **more)["choices"]
    found: dict[str, Any] = choice
    return found


def chat_of(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The body of a whole chat completion."""
    response = http.post(CHAT, json={**CONVERSATION, **more})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def streamed(http: httpx.Client, path: str = COMPLETIONS, **more: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it must."""
    with open_stream(http, path, **{**(CALL if path == COMPLETIONS else CONVERSATION), **more}) as stream:
        chunks = stream.read()
    assert stream.is_done
    return chunks


# Stop strings, and where an answer is cut.


def test_a_stop_that_does_not_come_makes_no_empty_chunks(http: httpx.Client) -> None:
    """vllm-project/vllm#13087: first chunks were empty with a stop string."""
    chunks = streamed(http, CHAT, stop=["\x00 never"])
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is None]
    assert [delta["content"] == "" for delta in deltas] == [True] + [False] * (len(deltas) - 1)


def test_the_end_token_ends_an_answer_that_has_other_stops(http: httpx.Client) -> None:
    """ollama/ollama#4524: the model's end no longer stopped such an answer."""
    choice = choice_of(http, ignore_eos=False, stop=["\x00 never"], logit_bias={"2": 100}, temperature=0)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("shape", SPECULATIVE)
def test_structured_output_may_contain_the_text_of_the_end(http: httpx.Client, shape: str) -> None:
    """dottxt-ai/outlines#515: an end token was allowed inside of JSON."""
    value = "a <|end|> b"
    choice = choice_of(
        http, structured_outputs={"json": {"enum": [value]}}, ignore_eos=False, speculation=SHAPES[shape]
    )
    assert (json.loads(choice["text"]), choice["finish_reason"]) == (value, "stop")


def test_a_part_of_a_character_has_its_own_bytes(http: httpx.Client) -> None:
    """ollama/ollama#13497: tokens with a part of a character had the bytes of U+FFFD."""
    chat = chat_of(http, structured_outputs={"choice": ["😀"]}, logprobs=True, ignore_eos=False)
    *tokens, _end = chat["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == "😀"


# Counts.


# Echo and logprobs.


def test_an_echo_needs_no_logprobs(http: httpx.Client) -> None:
    """vllm-project/vllm#2995: an echo without logprobs ended with an internal error."""
    text = choice_of(http)["text"]
    choice = choice_of(http, echo=True)
    assert choice["text"] == CALL["prompt"] + text
    assert choice["logprobs"] is None


def test_prompt_logprobs_are_right_beside_speculation_and_the_prefix_cache(http: httpx.Client) -> None:
    """vllm-project/vllm#53488: wrong; #3251 and #8268: an error if cached."""
    wish: dict[str, Any] = {"prompt": list(range(300, 390)), "max_tokens": 1, "prompt_logprobs": 1}
    first = choice_of(http, **wish, speculation=OFF, cache_salt="another")["prompt_logprobs"]
    for _ in range(2):
        again = choice_of(http, **wish, speculation=SHAPES["bv_race"])["prompt_logprobs"]
        for mine, theirs in zip(again[1:], first[1:], strict=True):
            found, right = ({key: one["logprob"] for key, one in place.items()} for place in (mine, theirs))
            assert found == pytest.approx(right, abs=1e-4)


def test_logprobs_come_when_no_others_are_asked_for(http: httpx.Client) -> None:
    """InternLM/lmdeploy#4121: `top_logprobs: 0` was refused; #2802: null."""
    content = chat_of(http, logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"]
    assert len(content) == CONVERSATION["max_tokens"]
    assert all(one["top_logprobs"] == [] and math.isfinite(one["logprob"]) for one in content)


# Seeds.


def test_without_a_seed_answers_differ(http: httpx.Client) -> None:
    """Blaizzy/mlx-vlm#1818: without a seed the same call had the same answer every time."""
    assert len({choice_of(http, seed=None, temperature=1)["text"] for _ in range(3)}) == 3


# Filters, penalties, bias.


@pytest.mark.parametrize("shape", SHAPES)
def test_min_tokens_counts_tokens_and_not_steps(http: httpx.Client, shape: str) -> None:
    """sgl-project/sglang#33643: the end stayed forbidden for min_tokens steps."""
    wish = {"min_tokens": 9, "ignore_eos": False, "logit_bias": {"2": 100}, "speculation": SHAPES[shape]}
    body = answer_of(http, **wish)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 10


def test_the_largest_token_survives_two_filters(http: httpx.Client) -> None:
    """ml-explore/mlx-lm#388: top_k of 1 and a top_p together masked every token."""
    certain = choice_of(http, temperature=0)["text"]
    assert choice_of(http, temperature=0.01, top_k=1, top_p=0.8)["text"] == certain


def test_min_p_filters(http: httpx.Client) -> None:
    """sgl-project/sglang#3284: min_p ended the server; #28179: another field did nothing."""
    assert choice_of(http, temperature=1, min_p=1.0)["text"] == choice_of(http, temperature=0)["text"]


# Characters.


def test_no_chunk_has_half_a_character(http: httpx.Client) -> None:
    """mlc-ai/mlc-llm#1142: such characters became replacement characters."""
    tokens = http.post("/tokenize", json={"prompt": "🔥é漢", "add_special_tokens": False}).json()["tokens"]
    assert len(tokens) > 3
    wish = {"allowed_token_ids": tokens, "temperature": 1, "max_tokens": 40}
    whole = choice_of(http, **wish)["text"]
    assert texts(streamed(http, **wish))[0] == whole
    parts = [chunk["choices"][0]["text"] for chunk in streamed(http, **wish, logprobs=None)]
    # A part that ends within a character would end with U+FFFD where the whole text has another
    # character.
    at = 0
    for part in parts:
        assert whole[at : at + len(part)] == part
        at += len(part)


# Structured output.


# The cache of prompts.


def test_a_salt_keeps_prompts_apart(http: httpx.Client) -> None:
    """sgl-project/sglang#23300: the salt did not reach the cache."""

    def cached(salt: str) -> int:
        usage = answer_of(http, prompt=list(range(700, 800)), max_tokens=1, cache_salt=salt)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("mine") == 0
    assert cached("theirs") == 0
    assert cached("mine") > 0


# Calls.


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_call_without_arguments_has_empty_ones(size: int) -> None:
    """vllm-project/vllm#28806, #11392 and #21301: a stream left out the arguments."""
    answer = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    reader = ToolCalls(ToolUse(TOOLS, HERMES, True, forced=False), None)
    pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    parts = [part for i, piece in enumerate(pieces) for part in reader.feed(piece, i == len(pieces) - 1)]
    assert "".join(part.arguments for part in parts if not isinstance(part, str)) == "{}"
    assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == [("add", {})]


def test_a_stop_string_stops_responses_too(http: httpx.Client) -> None:
    """Blaizzy/mlx-vlm#1044: `stop` was taken by this route, and nothing stopped."""
    call: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 24, "temperature": 0}

    def text_of(**more: Any) -> str:
        response = http.post("/v1/responses", json={**call, **more})
        assert response.status_code == 200, response.text
        return "".join(part["text"] for item in response.json()["output"] for part in item["content"])

    text = text_of()
    assert text_of(stop=[text[10:16]]) == text[: text.find(text[10:16])]
