"""Reading a body: its bounds to the value, what stands in strings, and the field that an error names.

What full bodies cost is in `test_body_costs.py`.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.api import RequestError
from server.http import bodies, errors
from server.http.bodies import nests_too_deeply, read_json
from server.http.openapi import Application
from server.openai import routes as generate_routes
from tests.server.test_body_costs import _NO_SERVER


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that small bodies exceed: 4 objects and lists, 3 strings, 5 values behind the first, 3 levels."""
    for name, most in {"_MOST_OBJECTS": 4, "_MOST_TEXTS": 3, "_MOST_VALUES": 5, "_DEEPEST": 3}.items():
        monkeypatch.setattr(bodies, name, most)


def read(body: bytes, names: tuple[str, ...] = ("model", "prompt")) -> Any:
    """Read without any wait: other work of the loop is let in, but no time passes."""

    async def reading() -> Any:
        def wait(*_: object) -> None:
            raise AssertionError("reading a body waits")

        asyncio.get_running_loop().call_later = asyncio.get_running_loop().call_at = wait  # type: ignore[assignment, method-assign]
        return await read_json(body, names)

    return asyncio.run(reading())


def refusal(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body)
    return caught.value


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("allowed", "refused", "words"),
    [
        ("[[],[],{}]", "[[],[],[],{}]", "the body holds more than 4 objects and lists"),
        ('["a","b","c"]', '["a","b","c","d"]', "the body holds more than 3 strings"),
        ("[1,2,3,4,5,6]", "[1,2,3,4,5,6,7]", "the body holds more than 5 values"),
        ("[[[1]]]", "[[[[1]]]]", "the body holds objects and lists that are nested more than 3 deep"),
        ('[{"a":[1]}]', '[{"a":[{}]}]', "the body holds objects and lists that are nested more than 3 deep"),
        ('["[[[[[,,,,,,{{{{{"]', '["",[],[],[],{}]', "the body holds more than 4 objects and lists"),
        # An escaped quote ends no string, and a quote after an escaped backslash ends one.
        (r'["\"[[[[[[","a"]', r'["\\",[],[],[],{}]', "the body holds more than 4 objects and lists"),
        (r'["\\\"[[[[[["]', r'["\\\\",[],[],[],{}]', "the body holds more than 4 objects and lists"),
    ],
)
def test_a_body_beyond_a_bound_is_refused(allowed: str, refused: str, words: str) -> None:
    assert read(allowed.encode()) == json.loads(allowed)
    error = refusal(refused.encode())
    assert (str(error), error.param) == (words, None)


@pytest.mark.usefixtures("few")
def test_the_largest_field_is_named() -> None:
    error = refusal(b'{"model":[1,2],"prompt":[1,2,3,4,5]}')
    assert (str(error), error.param) == ("prompt holds more than 5 values", "prompt")
    assert refusal(b'{"model":[1,2,3,4,5],"prompt":[1,2]}').param == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":1,"prompt":' + b"1" * 5000 + b"}", "prompt"),
        (b'{"model":"\xff","prompt":1}', "model"),
        (b'{"prompt":1} x', None),
        (b"", None),
        (b"{", None),
    ],
)
def test_a_field_that_is_no_json_is_named(body: bytes, param: str | None) -> None:
    error = refusal(body)
    assert error.param == param
    assert str(error).startswith(f"{param or 'the body'} is not valid JSON: ")


def test_a_mark_of_the_byte_order_may_stand_before_a_body() -> None:
    assert read(codecs.BOM_UTF8 + b'{"a":1}') == {"a": 1}
    assert refusal(b'{"a":1}' + codecs.BOM_UTF8).param is None


def test_json_in_a_string_nests_no_deeper() -> None:
    assert not nests_too_deeply("1")
    assert not nests_too_deeply("[" * 100 + "]" * 100)
    assert nests_too_deeply("[" * 101 + "]" * 101)
    assert nests_too_deeply('{"a\\"":' * 101 + "1" + "}" * 101)
    assert not nests_too_deeply('["' + "[" * 200 + '"]')


@pytest.mark.parametrize("padding", [0, 1 << 17])
def test_routes_read_small_and_large_bodies_alike(padding: int) -> None:
    """Deep values are refused by their field before a model is made of them."""
    app = Application()
    errors.install(app)
    app.include_router(generate_routes.build_router(_NO_SERVER))
    body = b'{"model":"x","prompt":' + b"[" * 101 + b"]" * 101 + b" " * padding + b"}"

    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})

    response = asyncio.run(answer())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "nested more than 100 deep" in response.json()["error"]["message"]


class NoTrim:
    """A C library that cannot give memory back."""

    @property
    def malloc_trim(self) -> Any:
        raise AttributeError


@pytest.mark.parametrize("library", ["glibc", "another", "none"])
def test_memory_goes_back_after_large_bodies_only(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """All of it, once the body is gone; where the C library cannot, nothing fails."""
    trimmed: list[int] = []

    def load(name: str | None) -> Any:
        if library == "none":
            raise OSError
        return SimpleNamespace(malloc_trim=trimmed.append) if library == "glibc" else NoTrim()

    monkeypatch.setattr(bodies, "_GONE_S", 0.0)
    monkeypatch.setattr(bodies.ctypes, "CDLL", load)
    app = Application()
    errors.install(app)
    app.include_router(generate_routes.build_router(_NO_SERVER))
    failures: list[Any] = []

    async def send(padding: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            body = b'{"model":"x","prompt":{}}' + b" " * padding
            await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        await asyncio.sleep(0.01)
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(send(0))
    assert not trimmed
    asyncio.run(send(1 << 17))
    assert trimmed == ([0] if library == "glibc" else [])
    assert not failures
