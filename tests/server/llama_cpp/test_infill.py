"""`/infill`: bodies of llama.vim and llama.vscode, and llama.cpp's answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import FILLING_CONTEXT, PREFIX
from tests.server.daemon_process import MODEL, Daemon
from tests.server.good_bodies import error_of
from tests.server.infill_models import ANSWER

INFILL = "/infill"
TEXTS = {"input_prefix": "def f(values):\n", "input_suffix": "\n\nprint(f([2]))\n", "prompt": "    return "}
EXTRA = [
    {"text": "import os\n", "time": [1, 2], "filename": "a.py"},
    {"text": "import re\n", "time": [1, 3], "filename": "b.py"},
]
EDITORS = {
    "llama.vim": {
        "id_slot": 0, **TEXTS, "input_extra": EXTRA, "n_predict": 128, "stop": [], "n_indent": 0, "top_k": 40,
        "top_p": 0.90, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": [
            "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
            "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
            "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated", "tokens_cached",
        ],
    },
    "llama.vscode": {
        **TEXTS, "input_extra": EXTRA, "n_predict": 128, "top_k": 40, "top_p": 0.99, "stream": False,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 0, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
    },
}  # fmt: skip
WARM_UPS = {
    "llama.vim": {
        "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0,
        "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1, "response_fields": [""],
    },
    "llama.vscode": {
        "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0, "samplers": [],
        "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1,
    },
}  # fmt: skip
GREEDY: dict[str, Any] = {**TEXTS, "n_predict": 30, "temperature": 0}


def answer_of(client: httpx.Client, **more: Any) -> dict[str, Any]:
    response = client.post(INFILL, json={**GREEDY, **more})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.parametrize("editor", EDITORS)
def test_an_editor_gets_the_text_of_the_gap(filling: httpx.Client, editor: str) -> None:
    response = filling.post(INFILL, json=EDITORS[editor])
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["content"] == ANSWER
    assert response.headers["x-polydraft-ignored-fields"] == "samplers.infill"
    if "response_fields" in EDITORS[editor]:
        assert list(answer) == EDITORS[editor]["response_fields"]
        assert answer["timings/predicted_n"] == 3
    else:
        assert (answer["stop"], answer["stop_type"], answer["truncated"]) == (True, "eos", False)
        assert answer["timings"]["prompt_n"] + answer["tokens_cached"] == answer["tokens_evaluated"]
        assert answer["generation_settings"]["temperature"] == 0
        assert (answer["generation_settings"]["top_k"], answer["generation_settings"]["top_p"]) == (40, 0.99)


@pytest.mark.parametrize("editor", WARM_UPS)
def test_a_warm_up_of_an_editor_has_no_text(filling: httpx.Client, editor: str) -> None:
    """Its K/V is cached for the request that follows."""
    response = filling.post(INFILL, json=WARM_UPS[editor])
    assert response.status_code == 200, response.text
    if editor == "llama.vim":
        assert response.json() == {}
    else:
        assert (response.json()["content"], response.json()["tokens_predicted"]) == ("", 0)


def test_the_prompt_has_other_files_first_and_the_line_last(filling: httpx.Client) -> None:
    (prompt,) = read_prompts(filling, [{"input_extra": EXTRA}])
    assert prompt == (
        "<|bos|><|repo_name|>repository\n<|file_sep|>a.py\nimport os\n<|file_sep|>b.py\nimport re\n"
        "<|file_sep|>file\n<|fim_prefix|>def f(values):\n<|fim_suffix|>\n\nprint(f([2]))\n<|fim_middle|>    return "
    )


def read_prompts(client: httpx.Client, bodies: list[dict[str, Any]]) -> list[str]:
    """Return the prompts that are read for some bodies."""
    prompts = []
    for body in bodies:
        fields = {**GREEDY, **body}
        extra = "".join(f"<|file_sep|>{one['filename']}\n{one['text']}" for one in fields.get("input_extra", []))
        head = f"<|repo_name|>repository\n{extra}<|file_sep|>file\n" if extra else ""
        prompt = (
            f"<|bos|>{head}<|fim_prefix|>{fields['input_prefix']}<|fim_suffix|>{fields['input_suffix']}"
            f"<|fim_middle|>{fields['prompt']}"
        )
        expected = client.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False}).json()["count"]
        assert answer_of(client, **body)["tokens_evaluated"] == expected
        prompts.append(prompt)
    return prompts


def test_a_stream_ends_with_one_last_event(filling: httpx.Client) -> None:
    with filling.stream("POST", INFILL, json={**GREEDY, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    events = [json.loads(frame.removeprefix("data: ")) for frame in text.split("\n\n") if frame]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == ANSWER
    assert set(events[0]) == {"index", "content", "tokens", "stop", "tokens_predicted", "tokens_evaluated"}
    assert sum(len(event["tokens"]) for event in events) == events[-1]["tokens_predicted"] == 3
    whole = answer_of(filling, return_tokens=True)
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    assert events[-1]["stop_type"] == "eos"


def test_a_text_is_continued_as_tabby_asks(filling: httpx.Client) -> None:
    """The same tokens as in a completion; the stream's last event stops."""
    prompt = "def f(values):\n    return "
    body = {
        "seed": 3,
        "prompt": prompt,
        "n_predict": 8,
        "temperature": 0.1,
        "penalty_last_n": 0,
        "presence_penalty": 0.5,
    }
    response = filling.post("/completion", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = [json.loads(frame.removeprefix("data: ")) for frame in response.text.split("\n\n") if frame]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    plain = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0.1, "seed": 3}
    expected = filling.post("/v1/completions", json=plain).json()["choices"][0]["text"]
    assert "".join(event["content"] for event in events) == expected
    whole = filling.post("/completion", json=body).json()
    assert (whole["content"], whole["stop_type"]) == (expected, events[-1]["stop_type"])
    error_of(filling.post("/completion", json={**body, "penalty_last_n": 64}), 400)


def test_bounds_of_lines_end_the_answer(filling: httpx.Client) -> None:
    cut = answer_of(filling, n_indent=4)
    assert (cut["content"], cut["stop_type"]) == ("sum(\n    values\n", "limit")
    assert answer_of(filling, t_max_predict_ms=60_000)["content"] == ANSWER
    stopped = answer_of(filling, stop=["values"])
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("sum(\n    ", "word", "values")
    short = answer_of(filling, n_predict=1)
    assert (short["content"], short["stop_type"]) == ("sum(\n    values\n", "limit")
    assert short["has_new_line"]


def test_texts_that_do_not_fit_are_cut(filling: httpx.Client) -> None:
    """The prefix at its beginning, the suffix at its end, other files from the first on."""
    long = "".join(f"line {number}\n" for number in range(400))
    answer = answer_of(filling, input_prefix=long, input_suffix=long, input_extra=EXTRA, n_predict=30)
    assert answer["truncated"]
    assert answer["content"] == ANSWER
    assert answer["tokens_evaluated"] == FILLING_CONTEXT - 30
    (fitting,) = [{"filename": "b.py", "text": "y\n"}]
    huge = {"filename": "a.py", "text": long}
    answer = answer_of(filling, input_extra=[huge, fitting])
    assert answer["truncated"]
    assert answer["tokens_evaluated"] == answer_of(filling, input_extra=[fitting])["tokens_evaluated"]
    without_bound = answer_of(filling, input_suffix=long, n_predict=-1)
    assert (without_bound["content"], without_bound["truncated"]) == (ANSWER, True)
    error = error_of(filling.post(INFILL, json={**GREEDY, "prompt": long}), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_samplers_select_the_filters(filling: httpx.Client) -> None:
    fields = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "repeat_penalty": 1.2}
    settings = answer_of(filling, **fields)["generation_settings"]
    assert settings | {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1} == settings
    settings = answer_of(filling, **fields, samplers=["dry", "temperature", "top_k"])["generation_settings"]
    assert settings | {"temperature": 0.5, "top_k": 7, "top_p": 1.0, "min_p": 0.0} == settings
    assert answer_of(filling, **fields, samplers=["top_p"])["generation_settings"]["temperature"] == 1
    for samplers in (["top_p", "top_k"], ["top_k", "temperature"], ["mirostat"], "kpt"):
        error = error_of(filling.post(INFILL, json={**GREEDY, "samplers": samplers}), 400)
        assert error["param"] == "samplers"


def test_several_answers_are_a_list(filling: httpx.Client) -> None:
    response = filling.post(INFILL, json={**GREEDY, "n_cmpl": 3, "seed": -1, "response_fields": ["content", "index"]})
    assert response.json() == [{"content": ANSWER, "index": index} for index in range(3)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_prefix": None}, "input_prefix"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 3, "min_tokens": 5}, "min_tokens"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"mirostat": 2}, "mirostat"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({"echo": True}, "echo"),
        ({"input_extra": ["text"]}, "input_extra.0"),
        ({"speculation": {"return_drafts": True}}, "speculation.return_drafts"),
    ],
)
def test_a_bad_body_is_refused_by_name(filling: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert error_of(filling.post(INFILL, json={**GREEDY, **fields}), 400)["param"] == param


def test_unknown_fields_are_ignored_and_named(filling: httpx.Client) -> None:
    response = filling.post(INFILL, json={**GREEDY, "n_probs": 3, "model": "", "user": "me"})
    assert response.status_code == 200
    assert response.headers["x-polydraft-ignored-fields"] == "n_probs"
    assert error_of(filling.post(INFILL, json={**GREEDY, "model": "other"}), 404)["param"] == "model"


def test_a_model_without_marks_refuses(http: httpx.Client) -> None:
    error = error_of(http.post(INFILL, json={**GREEDY, "model": MODEL}), 400)
    assert (error["param"], error["code"]) == ("input_suffix", "unsupported_value")
    assert "--fim-tokens" in error["message"]


def test_requests_without_a_key_get_401(one_seat: Daemon) -> None:
    with one_seat.client() as client:
        assert error_of(client.post(f"{PREFIX}{INFILL}", json=GREEDY), 401)["code"] == "invalid_api_key"
        assert error_of(client.post(INFILL, json=GREEDY), 401)["code"] == "invalid_api_key"


def test_the_start_log_has_the_tokens_in_their_order(filling_daemon: Daemon) -> None:
    assert "gaps are filled with the tokens <|fim_prefix|> <|fim_suffix|> <|fim_middle|>" in filling_daemon.log
