"""Ollama's API: lines, options, names, errors, and the programs that know only it."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.ollama.chats import OllamaChatRequest, OllamaGenerateRequest, as_chat
from tests.server.daemon_process import MODEL, Daemon
from tests.server.weather_tools import PARAMETERS, USER, WEATHER

CHAT, GENERATE = "/api/chat", "/api/generate"
LATEST = f"{MODEL}:latest"
SHORT = {"num_predict": 8, "seed": 3, "temperature": 1}
NPM = Path(__file__).parents[1] / "clients" / "npm"
ENDING = {
    "done_reason", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count",
    "eval_duration", "metrics",
}  # fmt: skip
# By program: path, body without the model, names that the header of the answer must have.
PROGRAMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Continue": (
        CHAT,
        {
            "messages": [{"role": "system", "content": "Be brief."}, USER], "keep_alive": 1800, "stream": True,
            "options": {"temperature": 0.5, "top_p": 0.9, "num_predict": 4, "stop": ["</s>"], "num_ctx": 8192},
            "tools": [WEATHER],
        },
        "num_ctx",
    ),
    "Continue, completion": (
        GENERATE,
        {
            "prompt": "def add(a, b):\n", "raw": True, "keep_alive": 1800, "stream": True,
            "options": {"temperature": 0.01, "num_predict": 4, "stop": ["\n\n"], "num_ctx": 8192},
        },
        "num_ctx",
    ),
    "Open WebUI": (
        CHAT,
        {
            "messages": [USER], "stream": True, "keep_alive": "5m", "format": "",
            "options": {
                "num_predict": 4, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5, "num_ctx": 2048,
                "num_batch": 512, "num_keep": 24, "repeat_last_n": -1, "tfs_z": 1, "use_mmap": True, "min_p": 0.05,
            },
        },
        "mirostat_eta, mirostat_tau, num_batch, num_ctx, num_keep, use_mmap",
    ),
    "Open WebUI, its tasks": (GENERATE, {"prompt": "A title.", "stream": False, "options": {"num_predict": 4}}, ""),
    "Home Assistant": (
        CHAT,
        {
            "messages": [USER], "tools": [WEATHER], "stream": True, "keep_alive": "-1s", "think": False,
            "options": {"num_ctx": 8192, "num_predict": 4},
        },
        "num_ctx, think",
    ),
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"model": "llama3.2:3b"}, 404, "The model 'llama3.2:3b' does not exist"),
    (CHAT, {"options": {"mirostat": 2}}, 400, "mirostat is not supported"),
    (CHAT, {"options": {"repeat_last_n": 64}}, 400, "repeat_last_n is not supported"),
    (CHAT, {"options": {"temprature": 1}}, 400, "did you mean temperature"),
    (CHAT, {"options": {"messages": []}}, 400, "options: messages is no option"),
    (CHAT, {"options": {"num_predict": "all"}}, 400, "num_predict"),
    (CHAT, {"format": {"type": "no such type"}}, 400, "format"),
    (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}, 400, "parts of type 'image' are not supported"),
    (CHAT, {"messages": [USER, {"role": "tool", "content": "12"}]}, 400, "no call is open"),
    (CHAT, {"temperature": 1}, 400, "temperature is not a field of this endpoint"),
    (CHAT, {"logprobs": True}, 400, "logprobs is not a field of this endpoint"),
    (CHAT, {"stream": "yes"}, 400, "stream"),
    (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
    (GENERATE, {"prompt": "x", "context": [1]}, 400, "context is not supported"),
    (GENERATE, {"prompt": "x", "suffix": "y"}, 400, "suffix: this model has no tokens for filling gaps"),
    (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, 400, "system does not go with raw"),
    ("/api/show", {"model": "nowhere"}, 404, "does not exist"),
    ("/api/embed", {"input": "x"}, 404, "no embeddings"),
    ("/api/pull", {}, 404, "the model that it was started with"),
]


@pytest.fixture
def client(tool_daemon: Daemon) -> Iterator[httpx.Client]:
    with tool_daemon.client() as client:
        yield client


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_stream_of_lines_has_the_text_of_the_whole_answer(client: httpx.Client) -> None:
    """The tokens equal the tokens of OpenAI's chat; the last line has counts and nanoseconds."""
    body = {"model": MODEL, "messages": [USER], "options": SHORT}
    streamed = client.post(CHAT, json=body)
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    *lines, last = lines_of(streamed)
    whole = client.post(CHAT, json={**body, "stream": False}).json()
    chat = {"model": MODEL, "messages": [USER], "max_tokens": 8, "seed": 3, "temperature": 1}
    answer = client.post("/v1/chat/completions", json=chat).json()
    text = "".join(line["message"]["content"] for line in lines)
    assert text == whole["message"]["content"] == answer["choices"][0]["message"]["content"]
    assert all(line.keys() == {"model", "created_at", "message", "done"} and not line["done"] for line in lines)
    assert last.keys() - lines[0].keys() == whole.keys() - lines[0].keys() == ENDING
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 8)
    assert last["prompt_eval_count"] == answer["usage"]["prompt_tokens"]
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 1000


def test_a_raw_prompt_is_continued(client: httpx.Client) -> None:
    asked = {"model": MODEL, "prompt": "Once", "raw": True, "options": SHORT}
    whole = client.post(GENERATE, json={**asked, "stream": False}).json()
    completion = {"model": MODEL, "prompt": "Once", "max_tokens": 8, "seed": 3, "temperature": 1}
    assert whole["response"] == client.post("/v1/completions", json=completion).json()["choices"][0]["text"]
    assert "".join(line["response"] for line in lines_of(client.post(GENERATE, json=asked))) == whole["response"]


def test_a_system_prompt_and_a_prompt_are_a_chat() -> None:
    generate = OllamaGenerateRequest(prompt="x", system="y", options={"num_predict": -1, "stop": ["z"]})
    chat = OllamaChatRequest.model_validate(
        {"messages": [{"role": "system", "content": "y"}, {"role": "user", "content": "x"}], "options": {"stop": ["z"]}}
    )
    assert as_chat(MODEL, generate).messages == as_chat(MODEL, chat).messages
    assert as_chat(MODEL, generate).max_tokens is None
    assert as_chat(MODEL, generate).stop == ["z"]


def test_results_answer_the_open_calls() -> None:
    """Calls are found by id, by the function's name, or in order."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    named = {"id": "seventh01", "function": {"name": "c", "arguments": {}}}
    results: list[dict[str, Any]] = [{"tool_name": "b"}, {"tool_call_id": "seventh01"}, {}, {"tool_name": "a"}]
    turns = [USER, {"role": "assistant", "tool_calls": [*calls, named]}]
    turns += [{"role": "tool", "content": "", **result} for result in results]
    chat = as_chat(MODEL, OllamaChatRequest.model_validate({"messages": turns}))
    answered = [message.tool_call_id for message in chat.messages if message.role == "tool"]
    assert answered == ["call00002", "seventh01", "call00001", "call00003"]


@pytest.mark.parametrize("asked", ["json", PARAMETERS], ids=["json", "schema"])
def test_a_format_is_followed(client: httpx.Client, asked: Any) -> None:
    options = {"num_predict": 60, "seed": 1, "temperature": 0}
    body = {"model": MODEL, "messages": [USER], "format": asked, "options": options, "stream": False}
    text = client.post(CHAT, json=body).json()["message"]["content"]
    assert text.startswith("{")
    if asked != "json":
        assert json.loads(text).keys() == {"city", "unit"}


def test_the_model_is_described_under_its_tagged_name(client: httpx.Client) -> None:
    """A request without text, which loads the model elsewhere, is answered at once."""
    (listed,) = client.get("/api/tags").json()["models"]
    (running,) = client.get("/api/ps").json()["models"]
    assert listed["name"] == running["name"] == LATEST
    assert running["size"] > 0
    assert running["context_length"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    for body in ({"model": LATEST}, {"name": MODEL}):
        shown = client.post("/api/show", json=body).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["model_info"]["llama.context_length"] == running["context_length"]
        assert all(len(line.split(" ")) == 2 for line in shown["parameters"].split("\n"))
    assert client.get("/api/version").json().keys() == {"version", "polydraft"}
    for path in (CHAT, GENERATE):
        assert client.post(path, json={"model": LATEST}).json()["done_reason"] == "load"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_body_of_a_program_is_answered(client: httpx.Client, program: str) -> None:
    path, body, ignored = PROGRAMS[program]
    answer = client.post(path, json={"model": LATEST, **body})
    assert lines_of(answer)[-1]["done"]
    assert ", ".join(sorted(answer.headers.get("x-polydraft-ignored-fields", "").split(", "))) == ignored


@pytest.mark.parametrize(("path", "fields", "status", "words"), REFUSED)
def test_what_is_not_served_is_refused_in_ollamas_form(
    client: httpx.Client, path: str, fields: dict[str, Any], status: int, words: str
) -> None:
    body: dict[str, Any] = {"model": MODEL, **fields}
    if path == CHAT:
        body = {"messages": [USER], "options": SHORT, **body}
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


@pytest.mark.slow
def test_a_gap_is_filled(filling: httpx.Client) -> None:
    asked = {"model": MODEL, "prompt": "def f(values):\n", "suffix": "\n", "stream": False, "options": SHORT}
    assert filling.post(GENERATE, json=asked).status_code == 200
    shown = filling.post("/api/show", json={"model": MODEL}).json()
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"]


@pytest.mark.slow
def test_the_python_client_is_served(tool_daemon: Daemon) -> None:
    ollama = pytest.importorskip("ollama")
    with contextlib.closing(ollama.Client(tool_daemon.url)) as client:
        assert client.list().models[0].model == LATEST
        assert client.ps().models[0].context_length == client.show(MODEL).modelinfo["llama.context_length"]
        whole = client.chat(MODEL, [USER], options=SHORT)
        streamed = client.chat(MODEL, [USER], options=SHORT, stream=True)
        assert whole.message.content == "".join(chunk.message.content for chunk in streamed) != ""
        assert json.loads(client.generate(MODEL, "x", format=PARAMETERS, options=SHORT | {"num_predict": 60}).response)
        with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
            client.chat("llama3.2:3b", [USER])
        assert caught.value.status_code == 404


@pytest.mark.slow
@pytest.mark.skipif(not (NPM / "node_modules" / "ollama").is_dir(), reason="not installed: make npm-check")
def test_the_javascript_client_is_served(tool_daemon: Daemon) -> None:
    done = subprocess.run(
        ["node", "ollama.mjs", tool_daemon.url, MODEL], cwd=NPM, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["streamed"] != ""
    assert found["listed"] == LATEST
    assert "does not exist" in found["refusal"]
