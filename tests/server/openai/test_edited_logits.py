"""Bias, penalties, words and min_tokens over HTTP, with speculation and without."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseError

from engine.errors import NON_FINITE, DeadlineExceeded, EngineBusy, EngineStopped, RequestError
from engine.sampling.edits import MASKED
from server.wire.errors import anthropic_error, responses_error, to_api_error
from tests.server.completions import CALL, SHAPES, answer_of
from tests.server.good_bodies import COMPLETIONS

FIELDS: dict[str, dict[str, Any]] = {
    "frequency_penalty": {"frequency_penalty": -2},
    "presence_penalty": {"presence_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 0.2},
    "logit_bias": {"logit_bias": {"300": 4, "301": 4.5, "302": -100}},
    "allowed_token_ids": {"allowed_token_ids": list(range(200, 260))},
    "bad_words": {"bad_words": ["reserve", "blue", "upon a"]},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": list(range(100, 2000))},
    "everything": {
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"300": 3},
        "bad_words": ["of"],
        "min_tokens": 5,
        "top_p": 0.9,
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "off"])
@pytest.mark.parametrize("field", FIELDS)
def test_at_temperature_0_the_text_is_that_of_plain_decoding(http: httpx.Client, field: str, shape: str) -> None:
    """Every field on every branch: counts and masks are those of the node's own path."""
    wish = {**FIELDS[field], "temperature": 0}
    plain, other = (answer_of(http, **wish, speculation=SHAPES[name]) for name in ("off", shape))
    assert other["choices"] == plain["choices"]
    assert other["usage"] == plain["usage"]


@pytest.mark.sampled
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_answer(http: httpx.Client, field: str) -> None:
    """None is accepted and ignored."""
    without = answer_of(http, temperature=0)
    assert answer_of(http, temperature=0, **FIELDS[field])["choices"] != without["choices"]


def test_only_allowed_tokens_come(http: httpx.Client) -> None:
    """Whatever is drafted, at temperature 1."""
    allowed = FIELDS["allowed_token_ids"]
    text = answer_of(http, **allowed, max_tokens=60)["choices"][0]["text"]
    tokens = http.post("/detokenize", json={"tokens": allowed["allowed_token_ids"]}).json()["prompt"]
    assert set(text) <= set(tokens)


@pytest.mark.slow
def test_bad_words_do_not_come(http: httpx.Client) -> None:
    """Neither at the beginning nor after a space."""
    with_them = answer_of(http, temperature=1, max_tokens=400, seed=8)["choices"][0]["text"]
    words = sorted({word for word in with_them.split() if word.isalpha()}, key=len)[-5:]
    text = answer_of(http, temperature=1, max_tokens=400, seed=8, bad_words=words)["choices"][0]["text"]
    assert words
    assert sum(text.split().count(word) for word in words) < sum(with_them.split().count(word) for word in words)


def test_a_bias_of_100_makes_a_token_certain(http: httpx.Client) -> None:
    """100 makes a token certain, -100 impossible."""
    certain = answer_of(http, temperature=1, logit_bias={"77": 100}, max_tokens=10)["choices"][0]["text"]
    assert certain == http.post("/detokenize", json={"tokens": [77] * 10}).json()["prompt"]


def test_min_tokens_is_before_any_end(http: httpx.Client) -> None:
    """End tokens, stop tokens and stop strings count from then on."""
    ends = {"ignore_eos": False, "stop_token_ids": list(range(3, 4096))}
    for count in (0, 1, 7):
        body = answer_of(http, min_tokens=count, **ends)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == count + 1
    letters = {"stop": list("aeiou "), "include_stop_str_in_output": True}
    at_once = answer_of(http, **letters)["usage"]["completion_tokens"]
    later = answer_of(http, **letters, min_tokens=12)["usage"]["completion_tokens"]
    assert at_once < 12 <= later


def test_a_bias_against_the_only_allowed_token_changes_nothing(http: httpx.Client) -> None:
    response = http.post(COMPLETIONS, json={**CALL, "allowed_token_ids": [500], "logit_bias": {"500": -100}})
    assert response.status_code == 200


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_whose_masks_leave_no_token_ends_with_an_error(http: httpx.Client, shape: str) -> None:
    """Before anything is drawn where lists show it, else where the answer gets there."""
    the = http.post("/tokenize", json={"prompt": " the", "add_special_tokens": False}).json()["tokens"]
    assert len(the) == 1
    masks = {"allowed_token_ids": the, "speculation": SHAPES[shape], "temperature": 1}
    for words in (["the"], ["the the the"]):
        response = http.post(COMPLETIONS, json={**CALL, **masks, "bad_words": words})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_token_left"
    events = events_of(http, COMPLETIONS, **CALL, **masks, bad_words=["the the the"])
    assert "".join(event["choices"][0]["text"] for event in events if event.get("choices")) in ("", " the", " the the")
    assert events[-1]["error"]["code"] == "no_token_left"


def events_of(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    response = http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_all_apis_blame_the_caller_for_masks_that_leave_no_token(http: httpx.Client) -> None:
    """After a 200, in the words of each."""
    the = http.post("/tokenize", json={"prompt": " the", "add_special_tokens": False}).json()["tokens"]
    body = {"model": CALL["model"], "allowed_token_ids": the, "bad_words": ["the the the"], "temperature": 1}
    messages = [{"role": "user", "content": "a"}]
    chat = events_of(http, "/v1/chat/completions", **body, messages=messages)[-1]["error"]
    assert (chat["type"], chat["code"], chat["param"]) == ("invalid_request_error", "no_token_left", "bad_words")
    failed = events_of(http, "/v1/responses", **body, input="a")[-1]
    assert failed["type"] == "response.failed"
    error = ResponseError.model_validate(failed["response"]["error"])
    assert (error.code, error.type, error.param) == ("invalid_prompt", "invalid_request_error", "bad_words")
    assert error.message == chat["message"]
    assert anthropic_error(to_api_error(MASKED))["error"] == {"type": error.type, "message": error.message}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MASKED, "invalid_prompt"),
        (RequestError("a", None, NON_FINITE), "server_error"),
        (EngineBusy("a"), "rate_limit_exceeded"),
        (EngineStopped("a"), "server_error"),
        (DeadlineExceeded("a"), "server_error"),
        (ValueError("a"), "server_error"),
    ],
)
def test_a_response_fails_with_a_code_that_clients_know(error: Exception, code: str) -> None:
    """The list is that of OpenAI's client."""
    assert ResponseError.model_validate(responses_error(to_api_error(error))).code == code


def test_a_bad_word_has_a_length(http: httpx.Client) -> None:
    for length, status in ((256, 200), (257, 400)):
        assert http.post(COMPLETIONS, json={**CALL, "bad_words": ["a" * length]}).status_code == status


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "off"])
def test_seed_stable_answers_are_those_of_plain_decoding_at_any_temperature(http: httpx.Client, shape: str) -> None:
    """The same seed, the same tokens, logprobs and all, whatever is drafted."""
    wish = {"temperature": 1, "top_p": 0.95, "seed_stable": True, "logprobs": 1, "n": 3, "seed": 8}
    plain, other = (answer_of(http, **wish, speculation=SHAPES[name]) for name in ("off", shape))
    texts = [choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in other["choices"]] == texts
    assert len(set(texts)) == 3
    assert texts != [choice["text"] for choice in answer_of(http, **{**wish, "seed_stable": False})["choices"]]
