"""Everything that does not generate, and the application around it when no engine runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server import version
from server.app import build_app
from server.serving.engine_client import EngineClient
from server.serving.metrics import ServerMetrics
from server.serving.observer import Observer
from server.settings.settings import Serve
from server.state import Server
from server.text.tokenizer import GenerationDefaults, Tokenizer
from server.version import COMMIT, VERSION
from tests.server.daemon_process import MODEL, ROOT
from tests.server.good_bodies import error_of
from tests.server.tiny_models import BOS, MAX_POSITIONS, VOCAB_SIZE

ORIGIN = "https://chat.example"


def test_tokenize_and_detokenize_round_trip(http: httpx.Client) -> None:
    """With and without special tokens."""
    body = http.post("/tokenize", json={"prompt": "hello there", "return_token_strs": True}).json()
    assert body["tokens"][0] == BOS
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == MAX_POSITIONS
    plain = http.post("/tokenize", json={"model": MODEL, "prompt": "hello there", "add_special_tokens": False}).json()
    assert plain["tokens"] == body["tokens"][1:]
    assert plain["token_strs"] is None
    assert http.post("/detokenize", json={"tokens": plain["tokens"]}).json() == {"prompt": "hello there"}


def test_a_conversation_is_tokenized_as_it_is_answered(http: httpx.Client) -> None:
    """The count of a conversation's tokens is the prompt's count in the usage of its answer."""
    messages = [{"role": "user", "content": "hello there"}]
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == count


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**70]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
)
def test_bad_tokens_and_texts_are_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """400 that names the field."""
    response = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"]


def test_another_model_has_no_tokens_here(http: httpx.Client) -> None:
    """Only the served model's tokenizer is at hand."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert error_of(http.post(path, json={"model": "another", **body}), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/load", "/metrics", "/v1/models"])
def test_probes_may_send_head(http: httpx.Client, path: str) -> None:
    """HEAD has the status of GET and no body; a route without GET has neither."""
    answer = http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert http.head("/tokenize").status_code == http.get("/tokenize").status_code == 405


def test_a_model_has_the_fields_that_benchmarks_read(http: httpx.Client) -> None:
    """`vllm bench serve` without --model reads id and root."""
    (card,) = http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", MAX_POSITIONS)
    assert Path(card["root"], "config.json").is_file()
    assert http.get(f"/v1/models/{MODEL}").json() == card


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ],
)
def test_request_without_a_model_gets_the_served_one(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """The answer names it."""
    assert http.post(path, json=body).json()["model"] == MODEL
    assert error_of(http.post(path, json={**body, "model": "another"}), 404)["code"] == "model_not_found"


def test_version_and_commit_are_reported(http: httpx.Client) -> None:
    """The build of an image writes the commit where the package looks for it."""
    assert http.get("/version").json() == {"version": VERSION, "commit": COMMIT}
    recipe = (ROOT / "Dockerfile").read_text()
    assert f"> {version._BUILT_FROM.relative_to(ROOT)};" in recipe
    assert "LABEL org.opencontainers.image.revision=$COMMIT" in recipe


@pytest.fixture
def app(models: Any) -> FastAPI:
    """The application around an engine that has not been started, with a route that breaks."""
    settings = Serve(model=str(models.target), api_key=["a-key"], allowed_origins=[ORIGIN], root_path="/proxied")
    server = Server(
        settings,
        EngineClient(settings.engine_config(), 1),
        Tokenizer(str(models.target)),
        GenerationDefaults(),
        Observer(ServerMetrics("tiny", compat=True), logs_requests=False),
        "tiny",
        None,
    )
    app = build_app(server)

    @app.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("a secret detail")

    return app


def ask(app: FastAPI, method: str, path: str, **headers: str) -> httpx.Response:
    """One request, without a network."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_an_internal_error_is_answered_and_logged(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    """500 in OpenAI's shape with the request's id; what happened is in the log and nowhere else."""
    response = ask(app, "GET", "/broken", **{"x-request-id": "mine"})
    error = error_of(response, 500)
    assert error["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "mine"
    (record,) = [record for record in caplog.records if record.name == "polydraft"]
    assert record.__dict__["fields"]["id"] == "mine"
    assert record.exc_info is not None
    assert "a secret detail" in str(record.exc_info[1])


def test_browsers_of_allowed_origins_may_ask(app: FastAPI) -> None:
    """A preflight needs no key and allows the header that carries it."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    response = ask(app, "OPTIONS", "/v1/chat/completions", origin=ORIGIN, **asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in response.headers["access-control-allow-headers"]
    refused = ask(app, "OPTIONS", "/v1/chat/completions", origin="https://elsewhere.example", **asked)
    assert "access-control-allow-origin" not in refused.headers


def test_the_tokenizer_is_described(http: httpx.Client) -> None:
    """Enough to do the same on the client's side."""
    described = http.get("/tokenizer_info").json()
    assert described["vocab_size"] == VOCAB_SIZE
    assert described["special_tokens"]["bos_token"] == "<|bos|>"
    assert "add_generation_prompt" in described["chat_template"]
