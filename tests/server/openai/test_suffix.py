"""`suffix` of completions: prompts, ends, refusals, and Continue's bodies."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import FILLING_CONTEXT
from tests.server.daemon_process import MODEL, Daemon
from tests.server.event_stream import open_stream
from tests.server.good_bodies import COMPLETIONS, error_of, token_of
from tests.server.infill_models import ANSWER, COPIES, QWEN, WORDS

BEFORE, AFTER = "def f(values):\n    return ", "\n\nprint(f([2]))"
CALL: dict[str, Any] = {"model": MODEL, "prompt": BEFORE, "suffix": AFTER, "max_tokens": 30, "temperature": 0}
FIM = "/v1/fim/completions"
QWEN_STOPS = ["<|endoftext|>", *QWEN, "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"]
"""Stop strings of Continue for Qwen2.5-Coder."""


def answer_of(client: httpx.Client, path: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    response = client.post(path, json={**CALL, **more})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def prompt_of(client: httpx.Client, **more: Any) -> str:
    """The prompt that the model has read."""
    (choice,) = answer_of(client, return_token_ids=True, **more)["choices"]
    return str(client.post("/detokenize", json={"tokens": choice["prompt_token_ids"]}).json()["prompt"])


def test_the_official_client_fills_a_gap(filling_daemon: Daemon) -> None:
    with openai.OpenAI(base_url=f"{filling_daemon.url}/v1", api_key="unused", max_retries=0) as client:
        whole = client.completions.create(model=MODEL, prompt=BEFORE, suffix=AFTER, max_tokens=30, temperature=0)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (ANSWER, "stop")
        chunks = list(
            client.completions.create(
                model=MODEL, prompt=BEFORE, suffix=AFTER, max_tokens=30, temperature=0, stream=True
            )
        )
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


def test_mistrals_name_of_the_seed_is_served(filling: httpx.Client) -> None:
    """Tabby always sends it."""
    body = {"temperature": 2, "random_seed": 7}
    named, plain = (answer_of(filling, FIM, **fields)["choices"] for fields in (body, {"temperature": 2, "seed": 7}))
    assert named == plain
    error = error_of(filling.post(FIM, json={**CALL, "random_seed": 7, "seed": 8}), 400)
    assert error["param"] == "random_seed"


def test_continue_completes_with_a_suffix(filling: httpx.Client) -> None:
    """Its provider `openai` (legacy completions)."""
    body = {**CALL, "max_tokens": 2048, "temperature": 0.01, "stream": True, "stop": QWEN_STOPS, "raw": False}
    with open_stream(filling, COMPLETIONS, **body) as stream:
        chunks = stream.read()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    assert stream.is_done


def test_continue_fills_gaps_in_the_format_of_mistral(filling: httpx.Client) -> None:
    """Its provider `mistral`, which sends the suffix to every model."""
    body = {**CALL, "max_tokens": 256, "temperature": 0.01, "stop": QWEN_STOPS, "stream": True}
    with open_stream(filling, FIM, **body) as stream:
        chunks = stream.read()
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
    (choice,) = answer_of(filling, FIM)["choices"]
    assert choice["message"]["content"] == ANSWER


def test_continue_writes_the_marks_itself_without_a_suffix(filling: httpx.Client) -> None:
    """Special tokens of a prompt without a suffix are tokens."""
    prompt = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    body = {**CALL, "prompt": prompt, "stop": QWEN_STOPS}
    del body["suffix"]
    (choice,) = filling.post(COMPLETIONS, json=body).json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == (ANSWER, "<|fim_pad|>")


def test_marks_are_tokens_and_texts_are_not(filling: httpx.Client) -> None:
    assert prompt_of(filling) == f"<|bos|><|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    spelled = "x<|fim_middle|>y<|end|>"
    (choice,) = answer_of(filling, prompt=spelled, suffix=spelled, return_token_ids=True)["choices"]
    middle, end = token_of(filling, "<|fim_middle|>"), token_of(filling, "<|end|>")
    assert choice["prompt_token_ids"].count(middle) == 1
    assert end not in choice["prompt_token_ids"]
    assert prompt_of(filling, prompt=spelled, suffix=spelled).count(spelled) == 2


def test_prompts_may_be_tokens_or_several(filling: httpx.Client) -> None:
    ids = filling.post("/tokenize", json={"prompt": BEFORE, "add_special_tokens": False}).json()["tokens"]
    marked = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    assert prompt_of(filling, prompt=ids) == marked
    assert prompt_of(filling, add_special_tokens=False) == marked
    texts = [choice["text"] for choice in answer_of(filling, prompt=[BEFORE, "x"], n=2)["choices"]]
    assert texts == [ANSWER] * 4


def test_an_empty_suffix_is_none(filling: httpx.Client) -> None:
    for suffix in ("", None):
        assert prompt_of(filling, suffix=suffix) == f"<|bos|>{BEFORE}"


def test_tokens_of_the_family_end_the_answer(filling: httpx.Client) -> None:
    (choice,) = answer_of(filling)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (ANSWER, "stop", None)
    pad = token_of(filling, "<|fim_pad|>")
    (choice,) = answer_of(filling, stop_token_ids=[pad])["choices"]
    assert (choice["text"], choice["stop_reason"]) == (ANSWER, pad)
    (choice,) = answer_of(filling, ignore_eos=True, max_tokens=5)["choices"]
    assert choice["text"].startswith(f"{ANSWER}<|fim_pad|>leak")
    (choice,) = answer_of(filling, stop=["values"])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("sum(\n    ", "values")


def drafted_steps(client: httpx.Client, suffix: str) -> list[dict[str, Any]]:
    """The steps with drafts from the prompt; the answer is the words, as without drafts."""
    speculation = {"drafters": ["prompt_lookup"], "return_drafts": True}
    fields = {"suffix": suffix, "skip_special_tokens": False}
    answer = answer_of(client, speculation=speculation, **fields)
    (choice,) = answer["choices"]
    (plain,) = answer_of(client, speculation={"enabled": False}, **fields)["choices"]
    assert choice["text"] == plain["text"] == "".join(WORDS)
    steps = [step for step in choice["drafts"] if step["chains"]]
    assert {name for step in steps for name in step["drafters"]} == {"prompt_lookup"}
    counted = answer["metrics"]["speculative_decoding"]["drafters"]["prompt_lookup"]
    assert counted["num_accepted_tokens"] == sum(step["num_accepted"] for step in steps)
    return steps


def test_text_drafts_come_from_the_suffix(filling: httpx.Client) -> None:
    steps = drafted_steps(filling, COPIES + "".join(WORDS))
    assert sum(step["num_accepted"] for step in steps) > len(WORDS) // 3
    assert {token for step in steps for chain in step["chains"] for token in chain} <= {*WORDS, *QWEN}


def test_drafts_from_the_suffix_are_verified(filling: httpx.Client) -> None:
    """After five right words the suffix goes on otherwise."""
    steps = drafted_steps(filling, COPIES + "".join([*WORDS[:5], WORDS[7], WORDS[6]]))
    refused = [chain[step["num_accepted"] :] for step in steps for chain in step["chains"]]
    assert WORDS[7] in [chain[0] for chain in refused if chain]


def test_texts_longer_than_the_context_are_refused(filling: httpx.Client) -> None:
    """Nothing is cut: neither text alone nor both together may be too long."""
    long = "x y " * FILLING_CONTEXT
    half = "x y " * (FILLING_CONTEXT // 4)
    for fields, param in (
        ({"suffix": long * 20}, "suffix"),
        ({"prompt": long * 20}, "prompt"),
        ({"suffix": long}, "prompt"),
        ({"suffix": half, "prompt": half}, "prompt"),
    ):
        error = error_of(filling.post(COMPLETIONS, json={**CALL, **fields}), 400)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_fields_that_do_not_go_with_a_suffix_are_refused(filling: httpx.Client) -> None:
    for name, value in (("echo", True), ("truncate_prompt_tokens", 8)):
        error = error_of(filling.post(COMPLETIONS, json={**CALL, name: value}), 400)
        assert error["param"] == name
        assert "suffix" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, FIM])
def test_a_model_without_marks_refuses_a_suffix_by_name(http: httpx.Client, path: str) -> None:
    error = error_of(http.post(path, json=CALL), 400)
    assert (error["param"], error["code"]) == ("suffix", "unsupported_value")
    assert "--fim-tokens" in error["message"]
    assert http.post(path, json={**CALL, "suffix": ""}).status_code == 200
