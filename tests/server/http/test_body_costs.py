"""Cost of a body: the largest values of wrong types, for every field and endpoint.

The fields come from the routes' own models, so that a new field is covered without a change here.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from engine.api import RequestError
from loadtest.client import metric
from server.anthropic import routes as messages_route
from server.http import error_responses
from server.http.bodies import BodyRoute, read_json
from server.http.openapi import Application
from server.llama_cpp import routes as infill_routes
from server.ollama import routes as ollama_routes
from server.openai import routes as generate_routes
from server.routes import operations as operation_routes
from server.state import Server
from tests.server.daemon_process import MODEL, Daemon

FULL_BYTES = (4 << 20) - 4096
OBJECTS, TEXTS, VALUES = 1 << 14, 1 << 17, 1 << 20
FIELDS = {
    "/api/generate": "prompt",
    "/api/show": "name",
    "/completion": "prompt",
    "/detokenize": "tokens",
    "/v1/completions": "prompt",
    "/v1/fim/completions": "prompt",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/infill": "input_prefix",
}
"""Field with the text of a body, if it is not `messages`, by path."""
MOST_ERRORS = 16
"""One for each branch of a union or field of an object, never for each element."""
MODULES = (generate_routes, messages_route, infill_routes, ollama_routes, operation_routes)
NO_SERVER = cast(Server, SimpleNamespace(client=None, tokenizer=None))
WRONG: dict[str, Any] = {
    "objects": [{}] * (OBJECTS - 8),
    "lists": [[]] * (OBJECTS - 8),
    "nulls": [None] * VALUES,
    "numbers": [1] * VALUES,
    "fractions": [1.5] * VALUES,
    "texts": ["a"] * TEXTS,
    "a text, then numbers": ["a", *[1] * VALUES],
    "numbers, then a text": [*[1] * VALUES, "a"],
    "lists, then an object": [*[[1]] * (OBJECTS - 8), {}],
    "messages of wrong types": [{"role": 1, "content": [{}] * 8}] * (OBJECTS // 16),
    "a message of wrong parts": [{"role": "user", "content": [{}] * (OBJECTS - 16)}],
    "names": {str(number): {} for number in range(OBJECTS - 8)},
    "a long text": "a" * FULL_BYTES,
}
"""At most as many of each as a body may hold."""


def routes() -> list[BodyRoute]:
    """Every route that takes a body; no handler is called."""
    found = [route for module in MODULES for route in module.build_router(NO_SERVER).routes]
    return [route for route in found if isinstance(route, BodyRoute) and route.body_field is not None]


def model_of(route: BodyRoute) -> type[BaseModel]:
    """The model of a route's body."""
    assert route.body_field is not None
    model = route.body_field.field_info.annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model


def fields() -> Iterator[tuple[type[BaseModel], str]]:
    """Every field once, with a model that has it."""
    seen: set[tuple[str, str]] = set()
    for route in routes():
        for name, field in model_of(route).model_fields.items():
            if (described := (name, repr(field))) not in seen:
                seen.add(described)
                yield model_of(route), name


def test_every_route_with_a_body_reads_it_with_bounds(daemon: Daemon) -> None:
    """The served description has no body that `BodyRoute` does not read."""
    with daemon.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    described = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert described == {route.path for route in routes()}


@pytest.mark.parametrize("kind", WRONG)
def test_no_field_has_an_error_for_each_element(kind: str) -> None:
    """A handful of errors and a bounded memory, whatever the field and however large its value."""
    checked = 0
    for model, name in fields():
        tracemalloc.start()
        try:
            model.model_validate({name: WRONG[kind]})
        except ValidationError as error:
            problems = [one for one in error.errors() if one["loc"][:1] == (name,)]
            assert len(problems) <= MOST_ERRORS, (model, name)
            checked += bool(problems)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 64 << 20, (model, name)
    assert checked > 50, "the sweep must reach fields that refuse the value"


def test_a_list_that_collects_its_errors_is_found() -> None:
    """The same sweep finds a list that collects its errors."""

    class Careless(BaseModel):
        prompt: list[str]

    with pytest.raises(ValidationError) as error:
        Careless.model_validate({"prompt": [1] * 1000})
    assert error.value.error_count() > MOST_ERRORS


def filled(piece: str, between: str = ",") -> bytes:
    """A list of one piece that fills a body."""
    count = FULL_BYTES // (len(piece) + len(between))
    return f"[{between.join([piece] * count)}]".encode()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (filled("{}"), "16384 objects"),
        (filled("[1]"), "16384 objects"),
        (b'[{"role":1,"content":[' + filled("{}") + b"]}]", "16384 objects"),
        (filled('"a"'), "131072 strings"),
        (filled("1"), "1048576 values"),
        (filled("null"), ""),
        (b"1" * FULL_BYTES, "out of range"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(FULL_BYTES // 12)) + b"}", "131072 strings"),
        (b'"' + rb"\\" * (FULL_BYTES // 2) + b'"', ""),
        (b'"' + rb"\"" * (FULL_BYTES // 2) + b'"', ""),
        (b'"' + b"[{," * (FULL_BYTES // 3) + b'"', ""),
        (b'["' + b'\\\\", "' * 1000 + rb"\"[{," * (FULL_BYTES // 5) + b'"]', ""),
    ],
    ids=lambda value: str(value[:12]),
)
def test_values_are_counted_before_they_are_made(value: bytes, told: str) -> None:
    """Only marks outside strings count; a refusal takes a few copies of the body."""
    body = b'{"model":"x","other":1,"prompt":' + value + b"}"
    tracemalloc.start()
    if told:
        with pytest.raises(RequestError, match=told) as refused:
            asyncio.run(read_json(body, ["model", "prompt"]))
        assert refused.value.param == "prompt"
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    else:
        assert asyncio.run(read_json(body, ["model", "prompt"])) == json.loads(body)
    tracemalloc.stop()


@pytest.mark.sampled
@pytest.mark.parametrize("path", [route.path for route in routes()])
def test_a_full_body_of_wrong_types_names_its_field(path: str) -> None:
    """Over HTTP: 400 in the shape of the endpoint, whose message stays short."""
    app = Application()
    error_responses.install(app)
    for module in MODULES:
        app.include_router(module.build_router(NO_SERVER))
    field = FIELDS.get(path, "messages")

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            headers = {"content-type": "application/json"}
            rest = f'"model": "{MODEL}", "max_tokens": 1'
            values = (
                filled("{}"),
                b'["a",' + b"1," * (VALUES - 8) + b"{}]",
                b'{"%s":1}' % (b"a" * VALUES),
            )
            bodies = [f'{{{rest}, "{field}": '.encode() + value + b"}" for value in values]
            return [await client.post(path, content=body, headers=headers) for body in bodies]

    for answer in asyncio.run(answers()):
        assert answer.status_code == 400
        assert field in str(answer.json()["error"])
        assert len(answer.content) < 8192
        if not path.startswith(("/v1/messages", "/api/")):
            assert answer.json()["error"]["param"].partition(".")[0] == field


def test_a_refused_body_is_freed_at_once() -> None:
    """Errors and frames hold each other no longer, so that no search for garbage is needed."""
    app = Application()
    error_responses.install(app)
    app.include_router(generate_routes.build_router(NO_SERVER))

    async def refused() -> int:
        for piece in ("{}", "1", '"a"', '["a"]'):
            await answer(b'{"model":"x","prompt":' + filled(piece) + b"}")
        return tracemalloc.get_traced_memory()[0]

    async def answer(body: bytes) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": ""}
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        statuses = []

        async def receive() -> Any:
            return messages.pop()

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
        assert statuses[0] == 400

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        assert asyncio.run(refused()) < FULL_BYTES
    finally:
        tracemalloc.stop()
        gc.enable()


LEAST: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.sampled
@pytest.mark.parametrize("path", LEAST)
def test_values_as_deep_as_readers_allow_are_answered(daemon: Daemon, path: str) -> None:
    """Nothing fails where it recurses, in any field and within objects."""
    route = next(route for route in routes() if route.path == path)
    tool = {"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {}}
    nested = {"name": "f", "arguments": '{"a":' + "[" * 900 + "]" * 900 + "}"}
    call = {"id": "a", "type": "function", "function": nested}
    with daemon.client() as client:
        for deep in ("[" * 90 + "]" * 90, '{"type":' * 90 + "1" + "}" * 90, '{"anyOf":[' * 45 + "]}" * 45):
            values = dict.fromkeys(model_of(route).model_fields, deep)
            inner = (
                ("tools", json.dumps([{**tool, "parameters": 0}]).replace("0", deep)),
                ("tools", json.dumps([{**tool, "function": {"name": "f", "parameters": 0}}]).replace("0", deep)),
                ("tools", json.dumps([{**tool, "type": "custom", "input_schema": 0}]).replace("0", deep)),
                ("response_format", '{"type":"json_schema","json_schema":{"name":"a","schema":' + deep + "}}"),
                ("output_config", '{"format":{"type":"json_schema","schema":' + deep + "}}"),
                ("text", '{"format":{"type":"json_schema","name":"a","schema":' + deep + "}}"),
                ("guided_json", json.dumps(deep)),
                ("metadata", '{"a":' + deep + "}"),
                ("chat_template_kwargs", '{"a":' + deep + "}"),
                ("documents", '[{"text":' + deep + "}]"),
                ("input", '[{"type":"message","role":"user","content":' + deep + "}]"),
                ("messages", '[{"role":"user","content":[{"type":"tool_result","content":' + deep + "}]}]"),
                ("messages", '[{"role":"assistant","content":[{"type":"tool_use","input":' + deep + "}]}]"),
                ("messages", json.dumps([{"role": "assistant", "tool_calls": [call]}])),
                ("input", json.dumps([{"type": "function_call", "call_id": "a", **nested}])),
            )
            for field, value in [*values.items(), *inner]:
                rest = {"model": MODEL, "max_tokens": 1, **LEAST[path]}
                rest.pop(field, None)
                body = f'{json.dumps(rest)[:-1]}, "{field}": {value}}}'
                answer = client.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400), (field, value[:60], answer.text)


def test_a_stream_goes_on_beside_full_bodies(daemon: Daemon) -> None:
    """Every body is answered while a stream runs, and the stream ends as if it were alone."""
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "seed": 1, "temperature": 1}
    with daemon.client() as client:
        alone = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    answers: list[int] = []

    def send() -> None:
        with daemon.client() as client:
            for value in (filled("{}"), b'["a",' + b"1," * (VALUES - 8) + b"1]", filled('"a"')):
                body = b'{"model": "%s", "prompt": ' % MODEL.encode() + value + b"}"
                headers = {"content-type": "application/json"}
                answers.append(client.post("/v1/completions", content=body, headers=headers).status_code)

    text = ""
    with daemon.client() as client, client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as stream:
        beside = threading.Thread(target=send)
        beside.start()
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
        beside.join()
    assert text == alone
    assert answers == [400] * 3


@pytest.mark.slow
def test_memory_of_large_bodies_is_given_back(http: httpx.Client, daemon: Daemon) -> None:
    """Without glibc's trim the process stays three times as large."""
    before = metric(daemon.url, "process_resident_memory_bytes")
    text = "word " * (FULL_BYTES // 5)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: http.post("/tokenize", json={"prompt": text}, timeout=120), range(10)))
    assert {answer.status_code for answer in answers} <= {200, 429}
    del answers
    ends_s = time.monotonic() + 30
    while metric(daemon.url, "process_resident_memory_bytes") > 1.6 * before and time.monotonic() < ends_s:
        time.sleep(0.5)
    assert metric(daemon.url, "process_resident_memory_bytes") < 1.6 * before
