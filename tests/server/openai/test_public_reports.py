"""Bug reports of other servers, tried here, with the right value of each.

Every test names its reports by project and number. A report is worth a test here if it can be tried
on the shared daemon or in the process.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import httpx
import pytest

from server.text.call_formats import HERMES
from server.text.tool_calls import ToolCalls
from server.text.tools import ToolUse
from server.wire.fields import Function, Tool
from tests.server.completions import CALL, OFF, SHAPES, answer_of, refusal_of
from tests.server.daemon_process import MODEL
from tests.server.event_stream import open_stream, texts
from tests.server.good_bodies import CHAT, COMPLETIONS, token_of
from tests.server.thing_schema import FORMAT, is_valid

SPECULATIVE = [name for name in SHAPES if name != "off"]
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
TOOLS = tuple(Tool(type="function", function=Function(name=name)) for name in ("weather", "add"))
CONVERSATION: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "seed": 3, "ignore_eos": True}


def choice_of(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The only choice of a completion."""
    (choice,) = answer_of(http, **more)["choices"]
    found: dict[str, Any] = choice
    return found


def bytes_of(token: str) -> bytes:
    """Return a token's name: its text, or `bytes:` and escapes for part of a letter."""
    if not token.startswith("bytes:"):
        return token.encode()
    return token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")


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


@pytest.mark.parametrize("length", [2, 5, 11])
def test_a_stop_string_over_several_tokens_is_cut_whole(http: httpx.Client, length: int) -> None:
    """vllm-project/vllm#3672: a stop string across tokens stayed in the text."""
    text = choice_of(http)["text"]
    start = next(at for at in range(20, 60) if text.find(text[at : at + length]) == at)
    stop = text[start : start + length]
    assert choice_of(http, stop=stop)["text"] == text[:start]
    assert texts(streamed(http, stop=stop))[0] == text[:start]


def test_the_stop_string_can_stay(http: httpx.Client) -> None:
    """vllm-project/vllm#1973: clients want to see which stop string ended it."""
    text = choice_of(http)["text"]
    stop = text[20:31]
    choice = choice_of(http, stop=["never", stop], include_stop_str_in_output=True)
    assert choice["text"] == text[: text.find(stop) + len(stop)]


def test_a_stop_that_does_not_come_makes_no_empty_chunks(http: httpx.Client) -> None:
    """vllm-project/vllm#13087: first chunks were empty with a stop string."""
    chunks = streamed(http, CHAT, stop=["\x00 never"])
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is None]
    assert [delta["content"] == "" for delta in deltas] == [True] + [False] * (len(deltas) - 1)


@pytest.mark.parametrize("held_back", [1, 6])
def test_text_that_was_held_back_is_sent_at_the_end(http: httpx.Client, held_back: int) -> None:
    """vllm-project/vllm#8468, ggml-org/llama.cpp#13785: a stream's end was lost."""
    text = choice_of(http)["text"]
    stop = text[-held_back:] + "\x00"
    assert texts(streamed(http, stop=stop))[0] == text


def test_logprobs_end_where_the_text_does(http: httpx.Client) -> None:
    """ggml-org/llama.cpp#2849 and ikawrakow/ik_llama.cpp#998: logprobs missed the cut."""
    whole = choice_of(http, logprobs=1)
    stop = whole["text"][20:24]
    cut = answer_of(http, logprobs=1, stop=stop)
    kept = cut["choices"][0]["logprobs"]["tokens"]
    assert kept == whole["logprobs"]["tokens"][: len(kept)]
    assert len(kept) == cut["usage"]["completion_tokens"]
    text = b"".join(bytes_of(token) for token in kept).decode(errors="replace")
    assert text.startswith(cut["choices"][0]["text"])


def test_the_end_token_ends_an_answer_that_has_other_stops(http: httpx.Client) -> None:
    """ollama/ollama#4524: the model's end no longer stopped such an answer."""
    choice = choice_of(http, ignore_eos=False, stop=["\x00 never"], logit_bias={"2": 100}, temperature=0)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_a_special_token_can_be_a_stop_string(http: httpx.Client) -> None:
    """vllm-project/vllm#2123, LostRuins/koboldcpp#791: such a stop string was skipped."""
    forced = {"logit_bias": {str(token_of(http, "<|user|>")): 100}, "temperature": 0, "stop": ["<|user|>"]}
    choice = choice_of(http, **forced)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "<|user|>")
    assert texts(streamed(http, **forced))[0] == ""


@pytest.mark.parametrize("shape", SPECULATIVE)
def test_structured_output_may_contain_the_text_of_the_end(http: httpx.Client, shape: str) -> None:
    """dottxt-ai/outlines#515: an end token was allowed inside of JSON."""
    value = "a <|end|> b"
    choice = choice_of(
        http, structured_outputs={"json": {"enum": [value]}}, ignore_eos=False, speculation=SHAPES[shape]
    )
    assert (json.loads(choice["text"]), choice["finish_reason"]) == (value, "stop")


def test_offsets_count_characters_of_several_tokens(http: httpx.Client) -> None:
    """abetlen/llama-cpp-python#1037, vllm-project/vllm#19368: offsets drifted."""
    text = "é 東京 😀"
    choice = choice_of(http, structured_outputs={"choice": [text]}, logprobs=2, ignore_eos=False)
    assert choice["text"] == text
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(text)
    whole = [(at, token) for at, token in zip(offsets, tokens, strict=True) if not token.startswith("bytes:")]
    assert all(text[at:].startswith(token) for at, token in whole if token != "<|end|>")


def test_a_part_of_a_character_has_its_own_bytes(http: httpx.Client) -> None:
    """ollama/ollama#13497: tokens with a part of a character had the bytes of U+FFFD."""
    chat = chat_of(http, structured_outputs={"choice": ["😀"]}, logprobs=True, ignore_eos=False)
    *tokens, _end = chat["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == "😀"


def test_the_end_token_is_called_stop(http: httpx.Client) -> None:
    """huggingface/text-generation-inference#2344: the reason was `eos_token`."""
    for path, call in ((COMPLETIONS, CALL), (CHAT, CONVERSATION)):
        body = http.post(path, json={**call, "ignore_eos": False, "logit_bias": {"2": 100}, "temperature": 0}).json()
        assert body["choices"][0]["finish_reason"] == "stop"


def test_each_choice_has_its_own_reason(http: httpx.Client) -> None:
    """modelscope/ms-swift#5025: the tokens of all choices together decided."""
    body = answer_of(http, n=3)
    stop = body["choices"][1]["text"][15:26]
    assert not any(stop in body["choices"][other]["text"] for other in (0, 2))
    reasons = [choice["finish_reason"] for choice in answer_of(http, n=3, stop=stop)["choices"]]
    assert reasons == ["length", "stop", "length"]


# Counts.


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_s_usage_is_that_of_the_whole_answer(http: httpx.Client, path: str) -> None:
    """vllm-project/vllm#8625: a stream counted other tokens; #6705 and #6083: none."""
    call = CALL if path == COMPLETIONS else CONVERSATION
    whole = http.post(path, json={**call, "n": 2}).json()["usage"]
    chunks = streamed(http, path, n=2, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [chunks[-1]["usage"][count] for count in counts] == [whole[count] for count in counts]
    assert whole["completion_tokens"] == 2 * call["max_tokens"]
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])


def test_usage_counts_tokens_and_not_chunks(http: httpx.Client) -> None:
    """abetlen/llama-cpp-python#1498: a chunk may have several tokens."""
    chunks = streamed(http, stream_options={"include_usage": True}, speculation={"rule": "block"})
    assert chunks[-1]["usage"]["completion_tokens"] == CALL["max_tokens"] > len(chunks) - 2


# Echo and logprobs.


def test_an_echo_needs_no_logprobs(http: httpx.Client) -> None:
    """vllm-project/vllm#2995: an echo without logprobs ended with an internal error."""
    text = choice_of(http)["text"]
    choice = choice_of(http, echo=True)
    assert choice["text"] == CALL["prompt"] + text
    assert choice["logprobs"] is None


def test_an_echo_has_every_token_of_the_prompt(http: httpx.Client) -> None:
    """vllm-project/vllm#27477, ggml-org/llama.cpp#27174: tokens were missing."""
    body = answer_of(http, echo=True, logprobs=1, max_tokens=1)
    found = body["choices"][0]["logprobs"]
    assert len(found["tokens"]) == body["usage"]["prompt_tokens"] + 1
    assert found["token_logprobs"][0] is None
    assert all(logprob < 0 for logprob in found["token_logprobs"][1:])


@pytest.mark.parametrize("shape", SPECULATIVE)
def test_logprobs_are_the_model_s_under_speculation(http: httpx.Client, shape: str) -> None:
    """vllm-project/vllm#34497, #17876, ggml-org/llama.cpp#27972: wrong, or all 0."""
    wish: dict[str, Any] = {"temperature": 0, "logprobs": 1, "max_tokens": 16}
    plain, other = (choice_of(http, **wish, speculation=SHAPES[name])["logprobs"] for name in ("off", shape))
    assert other["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-4)
    assert max(plain["token_logprobs"]) < -1e-3


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


def test_a_seed_holds_beside_requests_without_one(http: httpx.Client) -> None:
    """vllm-project/vllm#51226: a neighbour without a seed changed what a seed returned."""
    alone = choice_of(http, temperature=0.8)["text"]
    with open_stream(http, COMPLETIONS, **{**CALL, "seed": None, "max_tokens": 200}) as neighbour:
        next(neighbour)
        assert choice_of(http, temperature=0.8)["text"] == alone


def test_without_a_seed_answers_differ(http: httpx.Client) -> None:
    """Blaizzy/mlx-vlm#1818: without a seed the same call had the same answer every time."""
    assert len({choice_of(http, seed=None, temperature=1)["text"] for _ in range(3)}) == 3


# Filters, penalties, bias.


@pytest.mark.parametrize("key", ["4096", "191222", "-1"])
def test_a_bias_for_a_token_that_is_none_is_refused(http: httpx.Client, key: str) -> None:
    """vllm-project/vllm#16529, sgl-project/sglang#7670: it ended the engine."""
    assert refusal_of(http, logit_bias={key: 1})["param"] == "logit_bias"
    assert choice_of(http)["finish_reason"] == "length"


def test_a_bias_for_a_word_is_refused_by_name(http: httpx.Client) -> None:
    """InternLM/lmdeploy#2370: the example of an interactive page has words for keys."""
    assert refusal_of(http, logit_bias={"additionalProp1": 0})["param"].startswith("logit_bias")


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SPECULATIVE)
@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.4}, {"presence_penalty": 1.5}], ids=str
)
def test_penalties_count_every_accepted_token(http: httpx.Client, penalty: dict[str, Any], shape: str) -> None:
    """sgl-project/sglang#33643, #28179, #28180: penalties saw one token of a step."""
    plain, other = (choice_of(http, temperature=0, **penalty, speculation=SHAPES[name]) for name in ("off", shape))
    assert other["text"] == plain["text"]


@pytest.mark.parametrize("shape", SHAPES)
def test_min_tokens_counts_tokens_and_not_steps(http: httpx.Client, shape: str) -> None:
    """sgl-project/sglang#33643: the end stayed forbidden for min_tokens steps."""
    wish = {"min_tokens": 9, "ignore_eos": False, "logit_bias": {"2": 100}, "speculation": SHAPES[shape]}
    body = answer_of(http, **wish)
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 10


def test_min_tokens_holds_back_every_end(http: httpx.Client) -> None:
    """vllm-project/vllm#5849: only the first of several end tokens waited for min_tokens."""
    ends = list(range(100, 4000))
    body = answer_of(http, min_tokens=7, stop_token_ids=ends, ignore_eos=False, logit_bias={"300": 30})
    assert body["usage"]["completion_tokens"] == 8


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


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SPECULATIVE)
def test_structured_output_is_valid_under_speculation(http: httpx.Client, shape: str) -> None:
    """vllm-project/vllm#9423, #10442, #15554, #27969, #47025, InternLM/lmdeploy#4551."""
    wish = {"ignore_eos": False, "max_tokens": 200, "response_format": FORMAT}
    assert is_valid(choice_of(http, **wish, speculation=SHAPES[shape])["text"])


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


def test_every_case_names_its_report() -> None:
    tests = {name: one for name, one in vars(sys.modules[__name__]).items() if name.startswith("test_")}
    del tests["test_every_case_names_its_report"]
    reports = {name: re.findall(r"[\w.-]+/[\w.-]+#\d+", one.__doc__ or "") for name, one in tests.items()}
    assert [name for name, named in reports.items() if not named] == []
