"""Logprobs over HTTP: OpenAI's shapes, equal with speculation and in streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace

from engine.api import Request, TokenLogprob
from engine.scheduling.outcome import write_logprobs
from server.text.prompts import Arrival, ShownPrompt, with_prompts
from server.text.tokenizer import Tokenizer
from tests.server.completions import SHAPES, answer_of
from tests.server.daemon_process import MODEL
from tests.server.event_stream import open_stream
from tests.server.good_bodies import CHAT, COMPLETIONS
from tests.server.step_results import outcome, stats
from tests.server.tiny_models import TOKENIZER
from tests.wrong import calls_of

MESSAGES = [{"role": "user", "content": "A short story, please."}]


def completion_logprobs(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """`logprobs` of a completion, with its text and number of tokens."""
    body = answer_of(http, **{"logprobs": 3, **more})
    found: dict[str, Any] = body["choices"][0]["logprobs"]
    return {**found, "text": body["choices"][0]["text"], "count": body["usage"]["completion_tokens"]}


@pytest.mark.sampled
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0, "frequency_penalty": -1.5}])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "off"])
def test_logprobs_are_the_same_with_and_without_speculation(
    http: httpx.Client, shape: str, sampling: dict[str, Any]
) -> None:
    """The text is the same at temperature 0, and so is what the model found of every token."""
    plain, other = (completion_logprobs(http, **sampling, speculation=SHAPES[name]) for name in ("off", shape))
    assert other["tokens"] == plain["tokens"]
    assert other["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-4)
    for mine, theirs in zip(other["top_logprobs"], plain["top_logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_a_completions_logprobs_agree_with_its_text(http: httpx.Client) -> None:
    """One entry per token, offsets into the text, the likeliest first."""
    found = completion_logprobs(http, temperature=0)
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == found["count"]
    assert "".join(found["tokens"]) == found["text"]
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(found["count"])]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert top[token] == logprob == max(top.values()) <= 0
    none = completion_logprobs(http, logprobs=0)
    assert none["top_logprobs"] == [
        {token: one} for token, one in zip(none["tokens"], none["token_logprobs"], strict=True)
    ]


def test_an_unlikely_token_is_one_more_than_the_likeliest(http: httpx.Client) -> None:
    """OpenAI: up to logprobs + 1 elements, the sampled token among them."""
    for temperature, most in ((0, 2), (1.5, 3)):
        found = completion_logprobs(http, temperature=temperature, seed=3, logprobs=2)
        every = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        assert all(top[token] == logprob for token, logprob, top in every)
        assert max(map(len, found["top_logprobs"])) == most


def test_logprobs_are_of_the_model_not_of_the_sampling(http: httpx.Client) -> None:
    """Temperature and filters change what is drawn, not what is reported of it."""
    certain = completion_logprobs(http, temperature=0, logit_bias={"77": 100}, max_tokens=5)
    assert all(logprob < -1 for logprob in certain["token_logprobs"])


def test_a_stop_string_cuts_logprobs_too(http: httpx.Client) -> None:
    """Text, tokens, usage and logprobs agree about where the answer ends."""
    whole = completion_logprobs(http, temperature=0)
    stop = whole["tokens"][9].strip() or whole["tokens"][9]
    cut = completion_logprobs(http, temperature=0, stop=stop)
    assert len(cut["tokens"]) == cut["count"] < whole["count"]
    assert cut["tokens"] == whole["tokens"][: cut["count"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_carries_the_same_logprobs(http: httpx.Client, path: str) -> None:
    """Chunk by chunk what the whole answer has."""
    call: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "seed": 5, "ignore_eos": True}
    call |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} if path == CHAT else {}
    call |= {"prompt": "Once", "logprobs": 2} if path == COMPLETIONS else {}
    whole = http.post(path, json=call).json()["choices"][0]["logprobs"]
    with open_stream(http, path, **call) as stream:
        parts = [choice["logprobs"] for chunk in stream.read() for choice in chunk["choices"] if choice.get("logprobs")]
    key = "content" if path == CHAT else "tokens"
    assert [entry for part in parts for entry in part[key]] == whole[key]
    if path == COMPLETIONS:
        assert [offset for part in parts for offset in part["text_offset"]] == whole["text_offset"]


def test_the_openai_client_reads_them(openai_client: openai.OpenAI) -> None:
    """Chat: token, logprob, bytes and alternatives; the bytes make the text."""
    answer = openai_client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=12,
        logprobs=True,
        top_logprobs=4,
        seed=5,
        # Special tokens have bytes too.
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    assert all(len(entry.top_logprobs) == 4 for entry in logprobs.content)
    raw = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert (
        raw.decode(errors="ignore").strip() == (answer.choices[0].message.content or "").replace("\ufffd", "").strip()
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_an_echo_begins_with_the_prompt_and_its_logprobs(http: httpx.Client, shape: str) -> None:
    """The prompt's first token has no logprob; everything else is as without echo."""
    prompt = "Once upon a time there was a long prompt. " * 12
    call = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "speculation": SHAPES[shape]}
    plain, echoed = (completion_logprobs(http, **call, echo=echo) for echo in (False, True))
    assert echoed["text"] == prompt + plain["text"]
    assert echoed["tokens"][0] == "<|bos|>"
    assert "".join(echoed["tokens"][1:]) == echoed["text"]
    assert echoed["text_offset"][1] == 0
    assert echoed["text_offset"][-1] + len(echoed["tokens"][-1]) == len(echoed["text"])
    assert echoed["count"] == plain["count"] == 12
    assert echoed["tokens"][-12:] == plain["tokens"]
    assert echoed["token_logprobs"][-12:] == pytest.approx(plain["token_logprobs"], abs=1e-4)
    assert echoed["token_logprobs"][0] is echoed["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in echoed["token_logprobs"][1:])
    without = answer_of(http, **call, echo=True)["choices"][0]
    assert (without["text"], without["logprobs"]) == (echoed["text"], None)


def test_a_streamed_echo(http: httpx.Client) -> None:
    """The prompt comes with the first chunk; a stop string in it does not end the answer."""
    call: dict[str, Any] = {"model": MODEL, "prompt": "Stop, stop!", "max_tokens": 9, "echo": True, "logprobs": 0}
    call |= {"stop": "Stop", "seed": 3, "ignore_eos": True}
    whole = http.post(COMPLETIONS, json=call).json()["choices"][0]
    assert whole["text"].startswith("Stop, stop!")
    with open_stream(http, COMPLETIONS, **call) as stream:
        choices = [choice for chunk in stream.read() for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


@pytest.mark.parametrize("shape", SHAPES)
def test_prompt_logprobs_are_those_of_an_echo(http: httpx.Client, shape: str) -> None:
    """vLLM's field, also in chats; nothing for the first token."""
    wish = {"temperature": 0, "max_tokens": 3, "speculation": SHAPES[shape]}
    echoed = answer_of(http, **wish, echo=True, logprobs=0)["choices"][0]["logprobs"]["token_logprobs"]
    tokens = http.post("/tokenize", json={"prompt": "Once upon"}).json()["tokens"]
    (choice,) = answer_of(http, **wish, prompt_logprobs=2)["choices"]
    assert choice["logprobs"] is None
    first, *places = choice["prompt_logprobs"]
    assert first is None
    assert [place[str(token)]["logprob"] for place, token in zip(places, tokens[1:], strict=True)] == pytest.approx(
        echoed[1 : len(tokens)], abs=1e-4
    )
    for place in places:
        assert sorted(entry["rank"] for entry in place.values() if "rank" in entry) == [1, 2]
    call = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0}
    body = http.post(CHAT, json=call).json()
    assert len(body["choices"][0]["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_share_the_logprobs_of_their_prompt(http: httpx.Client, stream: bool) -> None:
    """Two prompts and three choices each: each echoes its prompt as a call for it alone does."""
    prompts = ["Once upon a time", "A dog " * 30]
    wish = {"echo": True, "logprobs": 3, "temperature": 0, "max_tokens": 4}
    alone = [answer_of(http, **wish, prompt=prompt)["choices"][0] for prompt in prompts]
    call = {"model": MODEL, **wish, "prompt": prompts, "n": 3}
    if stream:
        with open_stream(http, COMPLETIONS, **call) as opened:
            chunks = [choice for chunk in opened.read() for choice in chunk["choices"]]
    else:
        chunks = http.post(COMPLETIONS, json={**call, "prompt_logprobs": 1}).json()["choices"]
    for index in range(6):
        mine, expected = [chunk for chunk in chunks if chunk["index"] == index], alone[index // 3]
        assert "".join(chunk["text"] for chunk in mine) == expected["text"]
        for field in ("tokens", "text_offset"):
            assert [one for chunk in mine if chunk["logprobs"] for one in chunk["logprobs"][field]] == (
                expected["logprobs"][field]
            )
        found = [one for chunk in mine if chunk["logprobs"] for one in chunk["logprobs"]["token_logprobs"]]
        assert found[0] is None
        assert found[1:] == pytest.approx(expected["logprobs"]["token_logprobs"][1:], abs=1e-4)
        if not stream:
            assert len(mine[0]["prompt_logprobs"]) == len(found) - 4


def test_logprobs_of_a_prompt_are_asked_of_the_engine_once() -> None:
    """The first outcome carries them; earlier outcomes of other choices wait."""
    tokenizer = Tokenizer(str(TOKENIZER))
    ids = tuple(tokenizer.encode("Once upon a time"))
    requests = [Request(request_id=str(i), prompt_token_ids=ids, num_logprobs=1) for i in range(3)]
    prompt = ShownPrompt(replace(requests[0], num_prompt_logprobs=1), tokenizer, True, True, 1)
    written = [write_logprobs([TokenLogprob(-1.0, ((token, -1.0),))]) for token in ids[1:]]
    first = replace(outcome(1, 0), prompt_logprobs=written)

    async def early() -> AsyncGenerator[Arrival, None]:
        for index, one in ((2, outcome(1, 0)), (1, outcome(2, 0)), (0, first), (2, outcome(3, 0))):
            yield index, one, stats()

    async def order() -> list[tuple[int, int]]:
        with calls_of(tokenizer, "spell") as spelled:
            found = [(part[0], len(part[1].token_ids)) async for part in with_prompts(early(), [prompt], 3, tokenizer)]
        assert len(spelled) < 4 * len(ids), "spelled for each choice"
        return found

    assert [index for index, _ in asyncio.run(order())] == [0, 2, 1, 2]
    assert prompt.text == "Once upon a time"
    assert [token.logprob for token in prompt.tokens] == [None, *[-1.0] * (len(ids) - 1)]
    assert prompt.by_place is not None
    places = json.loads(bytes(prompt.by_place))
    assert places[0] is None
    assert [list(place) for place in places[1:]] == [[str(token)] for token in ids[1:]]
    tokenizer.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[5] * 200] * 100, "prompt_logprobs": 20, "n": 3}, "prompt_logprobs"),
        ({"prompt": [[5] * 200] * 100, "logprobs": 20, "echo": True, "n": 3}, "logprobs"),
    ],
)
def test_too_many_logprobs_are_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """Tokens of all prompts times alternatives times choices."""
    error = http.post(COMPLETIONS, json={"model": MODEL, "max_tokens": 1, **fields}).json()["error"]
    assert error["param"] == param
    assert "1260000 logprobs of prompt tokens" in error["message"]


def test_a_large_answer_is_encoded_in_its_own_thread(http: httpx.Client) -> None:
    """Above a size an answer goes out in pieces; it reads as a small one does."""
    wish: dict[str, Any] = {"prompt": "A dog " * 60, "prompt_logprobs": 20, "logprobs": 20, "n": 16, "max_tokens": 4}
    response = http.post(COMPLETIONS, json={"model": MODEL, **wish, "temperature": 0, "return_token_ids": True})
    body = response.json()
    assert int(response.headers["content-length"]) == len(response.content) > 1 << 19, "one piece; proves nothing"
    assert [choice["index"] for choice in body["choices"]] == list(range(16))
    assert all(choice["prompt_logprobs"] == body["choices"][0]["prompt_logprobs"] for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 64
    assert body["metrics"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_is_scored_without_an_answer(http: httpx.Client, shape: str) -> None:
    """max_tokens 0: the echo and its logprobs alone."""
    call = {"prompt": "Once upon a time", "temperature": 0, "speculation": SHAPES[shape]}
    one = completion_logprobs(http, **call, echo=True, max_tokens=1)
    none = completion_logprobs(http, **call, echo=True, max_tokens=0)
    assert none["count"] == 0
    assert none["text"] == "Once upon a time"
    assert none["tokens"] == one["tokens"][:-1]
    assert none["token_logprobs"][1:] == pytest.approx(one["token_logprobs"][1:-1], abs=1e-4)
    with open_stream(http, COMPLETIONS, model=MODEL, **call, echo=True, logprobs=3, max_tokens=0) as stream:
        (choice,) = [choice for chunk in stream.read() for choice in chunk["choices"]]
    assert (choice["text"], choice["finish_reason"]) == (none["text"], "length")
    assert choice["logprobs"]["tokens"] == none["tokens"]
    (empty,) = answer_of(http, **call, max_tokens=0)["choices"]
    assert (empty["text"], empty["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_characters_and_names_tell_bytes_apart(http: httpx.Client, echo: bool) -> None:
    """Offsets stay in the text, and no two tokens share a name."""
    word = "\u65e5\u672c\u8a9e\u2603\u65e5\u672c"
    fields = {"model": MODEL, "prompt": f"a{word}!", "echo": echo, "logprobs": 20, "max_tokens": 60, "seed": 1}
    choice = http.post("/v1/completions", json={**fields, "guided_choice": [word]}).json()["choices"][0]
    found, text = choice["logprobs"], choice["text"]
    assert text.endswith(word)
    assert len(found["tokens"]) > len(text)
    assert found["text_offset"] == sorted(found["text_offset"])
    assert found["text_offset"][-1] <= len(text)
    byte_numbers = [number for number, name in enumerate(found["tokens"]) if name.startswith("bytes:")]
    assert byte_numbers
    assert {found["text_offset"][number] for number in byte_numbers} >= {len(text) - 6, len(text) - 1}
    if echo:
        assert [found["text_offset"][number] for number in byte_numbers][:3] == [1, 1, 1]
    for name, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert top is None or (name in top and len(top) in (20, 21))
