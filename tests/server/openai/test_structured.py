"""Structured output: whatever drafts and verifies, the answer follows its grammar."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.completions import SHAPES
from tests.server.daemon_process import MODEL
from tests.server.good_bodies import CHAT, COMPLETIONS
from tests.server.thing_schema import FORMAT, SCHEMA, is_valid

CALL: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 300, "temperature": 1}


def answers(http: httpx.Client, **more: Any) -> list[dict[str, Any]]:
    """Choices of a completion that must succeed."""
    response = http.post(COMPLETIONS, json={**CALL, **more}, timeout=120)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES)
def test_a_schema_is_followed_on_every_branch(http: httpx.Client, shape: str) -> None:
    """Temperature 1, several choices."""
    for choice in answers(http, response_format=FORMAT, n=8, seed=3, speculation=SHAPES[shape]):
        assert choice["finish_reason"] == "stop"
        assert is_valid(choice["text"]), choice["text"]


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "off"])
def test_at_temperature_0_the_text_is_that_of_plain_decoding(http: httpx.Client, shape: str) -> None:
    """Masks do not depend on how the text came about."""
    plain, other = (
        answers(http, response_format=FORMAT, temperature=0, speculation=SHAPES[name]) for name in ("off", shape)
    )
    assert plain == other


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, "[0-9]{3}-[a-f]{2}"),
        ({"structured_outputs": {"choice": ["red", 'dark "green"', "blue"]}}, 'red|dark "green"|blue'),
        ({"structured_outputs": {"choice": ["one\ntwo", "a/b\r\\"]}}, r"one\ntwo|a/b\r\\"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, "ab+c"),
        ({"guided_regex": "(yes|no)!"}, "(yes|no)!"),
        ({"guided_choice": ["one", "two"]}, "one|two"),
        ({"guided_grammar": 'start: "a" "c"'}, "ac"),
    ],
)
def test_other_structures_are_followed(http: httpx.Client, structure: dict[str, Any], pattern: str) -> None:
    """vLLM's names, old and new, together with penalties and filters."""
    for choice in answers(http, **structure, n=4, top_p=0.95, frequency_penalty=0.5):
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


@pytest.mark.slow
def test_a_chat_answers_with_an_object(http: httpx.Client) -> None:
    """json_object: any object; usage counts its tokens."""
    call = {"model": MODEL, "messages": [{"role": "user", "content": "An object."}], "max_tokens": 1500, "top_k": 40}
    body = http.post(CHAT, json={**call, "response_format": {"type": "json_object"}, "temperature": 0.7}).json()
    text = body["choices"][0]["message"]["content"]
    assert text.lstrip().startswith("{")
    if body["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_grammar_goes_before_min_tokens(http: httpx.Client) -> None:
    """An answer that is complete ends before min_tokens."""
    (choice,) = answers(http, structured_outputs={"choice": ["yes", "no"]}, min_tokens=50)
    assert choice["text"] in ("yes", "no")


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_grammar_whose_tokens_are_bad_words_ends_with_an_error(
    http: httpx.Client, shape: str, temperature: float
) -> None:
    masks = {"structured_outputs": {"regex": "hello world"}, "bad_words": ["world"], "temperature": temperature}
    response = http.post(COMPLETIONS, json={**CALL, **masks, "speculation": SHAPES[shape]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "no_token_left"), error


@pytest.mark.slow
def test_a_thousand_answers_are_all_valid(http: httpx.Client) -> None:
    """All seats taken, four drafts, temperature 1."""

    def ask(number: int) -> list[dict[str, Any]]:
        rule = ("bv_race", "traversal", "weighted_race", "spectr_gbv")[number % 4]
        drafts = {"rule": rule, "num_drafts": 4, "draft_length": 3}
        return answers(http, guided_json=compact, n=4, seed=number, speculation=drafts)

    # Without white space the answers are half as long.
    compact = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}

    with ThreadPoolExecutor(16) as pool:
        choices = [choice for found in pool.map(ask, range(250)) for choice in found]
    assert len(choices) == 1000
    assert all(choice["finish_reason"] == "stop" and is_valid(choice["text"]) for choice in choices)


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["password", "binary", "int64", "regex"])
def test_unknown_schema_formats_are_ignored(http: httpx.Client, form: str) -> None:
    """A property or a constant of that name is none."""
    text = {"type": "string", "format": form, "maxLength": 3}
    schema = {
        "type": "object",
        "properties": {"format": text, "list": {"type": "array", "items": {"anyOf": [text]}, "maxItems": 2}}
        | {"day": {"type": "string", "format": "date"}, "is": {"const": {"format": form}}},
        "required": ["format", "list", "day", "is"],
        "additionalProperties": False,
    }
    for choice in answers(http, structured_outputs={"json": schema}, n=4, seed=1):
        thing = json.loads(choice["text"])
        assert thing["is"] == {"format": form}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", thing["day"])
