"""Reading a body: bounds to the value, strings, and the field of an error.

What full bodies cost is in `test_body_costs.py`.
"""

from __future__ import annotations

import asyncio
import codecs
import ctypes
import errno
import json
from types import SimpleNamespace
from typing import Annotated, Any, cast

import httpx
import pytest
import starlette.datastructures
from fastapi import APIRouter, File, UploadFile
from pydantic import BaseModel, model_validator

from engine.api import RequestError
from server.http import bodies, error_responses
from server.http.bodies import BodyRoute, read_json
from server.http.openapi import Application
from server.openai import routes as generate_routes
from server.state import Server
from server.wire.nesting import nests_too_deeply
from tests.wrong import instead

NO_SERVER = cast(Server, SimpleNamespace(client=None, tokenizer=None))
OBJECTS, TEXTS, VALUES, DEEPEST = 1 << 14, 1 << 17, 1 << 20, 100
"""Bounds of a body."""


def objects(count: int, before: str = "") -> str:
    """A list that holds this many lists and objects, with itself."""
    return f"[{before}{'[],' * (count - 2)}{{}}]"


def numbers(count: int) -> str:
    """A list of this many numbers after the first."""
    return f"[{'1,' * count}1]"


def strings(count: int) -> str:
    """A list of this many strings."""
    return json.dumps(["a"] * count)


BRACKETS = "[" * OBJECTS + ",{{"
TOO_MANY = f"the body holds more than {OBJECTS} objects and lists"
TOO_DEEP = f"the body holds objects and lists that are nested more than {DEEPEST} deep"
BOUNDS = {
    "objects": (objects(OBJECTS), objects(OBJECTS + 1), TOO_MANY),
    "strings": (strings(TEXTS), strings(TEXTS + 1), f"the body holds more than {TEXTS} strings"),
    "values": (numbers(VALUES), numbers(VALUES + 1), f"the body holds more than {VALUES} values"),
    "lists in lists": ("[" * DEEPEST + "]" * DEEPEST, "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), TOO_DEEP),
    "objects in objects": ('{"a":' * 99 + "{}" + "}" * 99, '{"a":' * 100 + "{}" + "}" * 100, TOO_DEEP),
    "brackets in a string": ('["' + BRACKETS + '"]', objects(OBJECTS + 1, '"",'), TOO_MANY),
    # An escaped quote ends no string, and a quote after an escaped backslash ends one.
    "an escaped quote": (r'["\"' + BRACKETS + '","a"]', objects(OBJECTS + 1, r'"\\",'), TOO_MANY),
    "a quote after backslashes": (r'["\\\"' + BRACKETS + '"]', objects(OBJECTS + 1, r'"\\\\",'), TOO_MANY),
}
"""(a body at a bound, one beyond it, the error)"""


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


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_body_beyond_a_bound_is_refused(bound: str) -> None:
    allowed, refused, words = BOUNDS[bound]
    assert read(allowed.encode()) == json.loads(allowed)
    error = refusal(refused.encode())
    assert (str(error), error.param) == (words, None)


def test_the_largest_field_is_named() -> None:
    few, many = numbers(1), numbers(VALUES)
    error = refusal(f'{{"model":{few},"prompt":{many}}}'.encode())
    assert (str(error), error.param) == (f"prompt holds more than {VALUES} values", "prompt")
    assert refusal(f'{{"model":{many},"prompt":{few}}}'.encode()).param == "model"


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
    error_responses.install(app)
    app.include_router(generate_routes.build_router(NO_SERVER))
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

    monkeypatch.setattr(ctypes, "CDLL", load)
    app = Application()
    error_responses.install(app)
    app.include_router(generate_routes.build_router(NO_SERVER))
    failures: list[Any] = []

    async def send(padding: int) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        loop.call_later = lambda _, *what: loop.call_soon(*what)  # type: ignore[assignment, method-assign]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            body = b'{"model":"x","prompt":{}}' + b" " * padding
            await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        await asyncio.sleep(0)
        await loop.shutdown_default_executor()

    asyncio.run(send(0))
    assert not trimmed
    asyncio.run(send(1 << 17))
    assert trimmed == ([0] if library == "glibc" else [])
    assert not failures


class _Turns:
    number = 0


class Noted(BaseModel):
    """Body that notes the turns of the event loop in which it is validated."""

    texts: list[str]
    turn: int = 0

    @model_validator(mode="after")
    def _note(self) -> Noted:
        self.turn = _Turns.number
        return self


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [(MemoryError(), 503, "out_of_memory"), (OSError(errno.ENOSPC, "No space left"), 507, "storage_unavailable")],
    ids=["memory", "disk"],
)
@pytest.mark.parametrize("is_form", [False, True])
def test_a_body_without_room_is_no_fault_of_its_client(fault: Exception, status: int, code: str, is_form: bool) -> None:
    """The framework turns each error of reading into a 400."""
    app, router = Application(), APIRouter(route_class=BodyRoute)

    @router.post("/json")
    async def read_body(body: dict[str, int]) -> None:
        raise AssertionError

    @router.post("/form")
    async def read_form(file: Annotated[UploadFile, File()]) -> None:
        raise AssertionError

    app.include_router(router)
    error_responses.install(app)

    async def fails(right: Any, *operands: Any) -> None:
        raise fault

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            if is_form:
                return await client.post("/form", files={"file": b"x"})
            return await client.post("/json", json={"a": 1})

    with instead(starlette.datastructures.UploadFile, "write", fails), instead(bodies, "read_json", fails):
        response = asyncio.run(run())
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert int(response.headers["retry-after"]) > 0


def test_bodies_that_come_together_are_validated_in_different_turns() -> None:
    """Other tasks run between them, however many come at once."""
    app, router = Application(), APIRouter(route_class=BodyRoute)

    @router.post("/")
    async def read(body: Noted) -> int:
        return body.turn

    app.include_router(router)

    async def count() -> None:
        while True:
            _Turns.number += 1
            await asyncio.sleep(0)

    async def ask() -> list[int]:
        counting = asyncio.create_task(count())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answers = await asyncio.gather(*(client.post("/", json={"texts": ["a"] * 2000}) for _ in range(20)))
        counting.cancel()
        return [answer.json() for answer in answers]

    turns = asyncio.run(ask())
    assert len(set(turns)) == 20


@pytest.mark.parametrize("text", [r"\ud800", r"a\uDFFFb", r"\ud800\ud800\udc00"])
def test_half_of_a_character_is_named(text: str) -> None:
    """The library's message would be about a truncated text."""
    with pytest.raises(RequestError, match=r"not valid JSON: .*half of a character"):
        asyncio.run(read_json(b'{"prompt": "%s"}' % text.encode(), ["prompt"]))
