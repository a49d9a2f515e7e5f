"""Stop strings and stop tokens of answers: nothing after them, no trace of them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.daemon_process import MODEL
from tests.server.event_stream import open_stream, texts

PATH = "/v1/completions"
CALL: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 48, "seed": 11, "ignore_eos": True}


@pytest.fixture
def full_text(http: httpx.Client) -> str:
    """Answer of `CALL` without stop strings."""
    answer = http.post(PATH, json=CALL).json()
    text: str = answer["choices"][0]["text"]
    assert len(text) > 80
    return text


def a_stop_in(text: str, start: int) -> str:
    """Nine characters of `text` from `start` on: longer than a token, so they span several."""
    stop = text[start : start + 9]
    assert text.find(stop) == start, "the random text repeats itself; choose another seed"
    return stop


@pytest.mark.parametrize("start", [0, 30, 60])
@pytest.mark.parametrize("as_list", [False, True])
def test_an_answer_ends_before_its_stop_string(http: httpx.Client, full_text: str, start: int, as_list: bool) -> None:
    """Whole and streamed, with the reason `stop`."""
    stop = a_stop_in(full_text, start)
    call = {**CALL, "stop": ["never to be seen", stop] if as_list else stop}
    whole = http.post(PATH, json=call).json()
    (choice,) = whole["choices"]
    assert choice["text"] == full_text[:start]
    assert choice["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] < CALL["max_tokens"]
    with open_stream(http, PATH, **call, stream_options={"include_usage": True}) as stream:
        chunks = stream.read()
    assert stream.is_done
    assert texts(chunks)[0] == full_text[:start]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == whole["usage"]


def test_no_chunk_holds_the_beginning_of_a_stop_string(http: httpx.Client, full_text: str) -> None:
    """Text that may become a stop string is held back."""
    stop = a_stop_in(full_text, 40)
    sent = ""
    with open_stream(http, PATH, **CALL, stop=[stop]) as stream:
        for chunk in stream:
            sent += chunk["choices"][0]["text"]
            assert full_text[:40].startswith(sent)
    assert sent == full_text[:40]


def test_the_stop_string_can_be_included(http: httpx.Client, full_text: str) -> None:
    """With `include_stop_str_in_output` the answer ends behind it."""
    stop = a_stop_in(full_text, 30)
    answer = http.post(PATH, json={**CALL, "stop": stop, "include_stop_str_in_output": True}).json()
    assert answer["choices"][0]["text"] == full_text[: 30 + len(stop)]


def test_a_stop_string_that_never_comes_changes_nothing(http: httpx.Client, full_text: str) -> None:
    """Text held back for a stop string that did not come is sent at the end."""
    stop = full_text[-4:] + "?!"
    answer = http.post(PATH, json={**CALL, "stop": stop}).json()
    assert answer["choices"][0]["text"] == full_text
    assert answer["choices"][0]["finish_reason"] == "length"
    with open_stream(http, PATH, **CALL, stop=stop) as stream:
        assert texts(stream.read())[0] == full_text


def test_a_stop_token_ends_the_answer_without_its_text(http: httpx.Client, full_text: str) -> None:
    """A stop token counts as a token of the answer, and its text is left out."""
    tokens = http.post("/tokenize", json={"prompt": full_text, "add_special_tokens": False}).json()["tokens"]
    # The text may be spelled by other tokens than those drawn: try until one of them was.
    for number in range(8, len(tokens)):
        answer = http.post(PATH, json={**CALL, "stop_token_ids": [tokens[number]]}).json()
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            assert full_text.startswith(choice["text"])
            assert 0 < len(choice["text"]) < len(full_text)
            assert answer["usage"]["completion_tokens"] < CALL["max_tokens"]
            return
    pytest.fail("none of the text's tokens ended it")


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Once upon"}]}


@pytest.mark.parametrize(("path", "prompt"), [(PATH, {}), ("/v1/chat/completions", CHAT)])
def test_stop_reason_names_the_stop(http: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    """`stop_reason` is the stop string or the token's id, in a stream's last chunk alone."""
    call = {key: value for key, value in CALL.items() if not prompt or key != "prompt"} | prompt
    (free,) = http.post(path, json={**call, "return_token_ids": True}).json()["choices"]
    text = free["text"] if path == PATH else free["message"]["content"]
    # A token that came before would end the answer there.
    token = next(one for at, one in enumerate(free["token_ids"]) if at > 8 and one not in free["token_ids"][:at])
    stop = a_stop_in(text, 30)
    cases: list[tuple[dict[str, Any], str | int | None]] = [
        ({"stop": ["never to be seen", stop]}, stop),
        ({"stop_token_ids": [2, token]}, token),
        ({"stop": ["never to be seen"], "stop_token_ids": [2]}, None),
    ]
    for fields, ended_by in cases:
        (choice,) = http.post(path, json={**call, **fields}).json()["choices"]
        assert choice["stop_reason"] == ended_by
        assert choice["finish_reason"] == ("length" if ended_by is None else "stop")
        with open_stream(http, path, **call, **fields) as stream:
            chunks = [chunk["choices"][0] for chunk in stream.read() if chunk["choices"]]
        reported = [chunk["stop_reason"] for chunk in chunks if "stop_reason" in chunk]
        assert reported == [ended_by]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]


def test_each_choice_stops_by_itself(http: httpx.Client) -> None:
    """A stop string of one choice does not end the others."""
    call = {**CALL, "n": 3}
    free = [choice["text"] for choice in http.post(PATH, json=call).json()["choices"]]
    stop = a_stop_in(free[1], 20)
    assert stop not in free[0] + free[2]
    answer = http.post(PATH, json={**call, "stop": stop}).json()
    assert [choice["text"] for choice in answer["choices"]] == [free[0], free[1][:20], free[2]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop", "length"]


USER = 4
"""Id of the special token `<|user|>` of the embedded pair."""
FORCED: dict[str, Any] = {**CALL, "max_tokens": 6, "temperature": 0, "logit_bias": {str(USER): 100}}


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("stop", ["<|user|>", "<|user|><|user|>"])
def test_a_special_token_that_is_not_shown_ends_an_answer(http: httpx.Client, stop: str, includes: bool) -> None:
    """Tokens are cut after the one that completes the stop string."""
    free = http.post(PATH, json={**FORCED, "return_token_ids": True}).json()["choices"][0]
    assert free["token_ids"] == [USER] * 6
    assert free["text"] == ""
    call = {**FORCED, "stop": [stop], "include_stop_str_in_output": includes}
    answer = http.post(PATH, json=call).json()
    (choice,) = answer["choices"]
    expected = stop if includes else ""
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    assert answer["usage"]["completion_tokens"] == stop.count("user")
    with open_stream(http, PATH, **call) as stream:
        assert texts(stream.read()).get(0, "") == expected


def test_a_special_token_may_be_a_stop_of_a_chat_or_a_bad_word(http: httpx.Client) -> None:
    forced = {key: value for key, value in FORCED.items() if key != "prompt"}
    (choice,) = http.post("/v1/chat/completions", json={**forced, **CHAT, "stop": "<|user|>"}).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("stop", "<|user|>", "")
    barred = http.post(PATH, json={**FORCED, "bad_words": ["<|user|>"], "return_token_ids": True}).json()
    assert USER not in barred["choices"][0]["token_ids"]
