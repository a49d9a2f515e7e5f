"""Bodies that come together: objects at a time, waiting ones, and neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import httpx
import pytest
from fastapi import APIRouter
from pydantic import BaseModel, model_validator

from engine.api import EngineBusy
from server.http import error_responses
from server.http.bodies import BodyRoute
from server.http.body_queue import BodyQueue, BodyQueues
from server.http.openapi import Application
from server.wire.current_call import HttpCall, current_call, this_call

MANY = {"texts": ["a"] * 40_000}
"""Body that is long."""
FEW = {"texts": ["a"] * 1_000}
"""Body that is short, but not small."""


class Counted(BaseModel):
    """Body that counts how many were validated."""

    texts: list[str]

    @model_validator(mode="after")
    def _count(self) -> Counted:
        Validated.number += 1
        return self


class Validated:
    """Number of validated bodies."""

    number = 0


def serve(handle: Callable[[Counted], Awaitable[int]]) -> tuple[Application, httpx.AsyncClient]:
    """Return an application with one route, and its client."""
    app, router = Application(), APIRouter(route_class=BodyRoute)

    @router.post("/")
    async def read(body: Counted) -> int:
        return await handle(body)

    app.include_router(router)
    error_responses.install(app)
    Validated.number = 0
    return app, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_bodies_wait_as_bytes_until_prompts_are_known() -> None:
    """Objects of hundreds of bodies would make each garbage collection take long."""
    free = asyncio.Event()

    async def handle(body: Counted) -> int:
        await free.wait()
        return len(body.texts)

    async def run() -> None:
        _, client = serve(handle)
        async with client:
            long = [asyncio.create_task(client.post("/", json=MANY)) for _ in range(20)]
            await settle()
            assert Validated.number == 2
            short = [asyncio.create_task(client.post("/", json=FEW)) for _ in range(20)]
            await settle()
            assert Validated.number == 2 + 8, "short bodies do not wait for long ones"
            free.set()
            answers = await asyncio.gather(*long, *short)
        assert [answer.json() for answer in answers] == [40_000] * 20 + [1_000] * 20

    asyncio.run(run())


def test_the_next_body_is_read_once_the_prompt_is_known() -> None:
    """The answer may take minutes."""
    free = asyncio.Event()

    async def handle(body: Counted) -> int:
        this_call().on_prompt.close()
        await free.wait()
        return len(body.texts)

    async def run() -> None:
        _, client = serve(handle)

        async def ask() -> httpx.Response:
            current_call.set(HttpCall("", ""))
            return await client.post("/", json=MANY)

        async with client:
            asked = [asyncio.create_task(ask()) for _ in range(10)]
            await settle()
            assert Validated.number == 10
            free.set()
            assert {answer.json() for answer in await asyncio.gather(*asked)} == {40_000}

    asyncio.run(run())


def test_more_than_may_wait_is_refused_before_it_is_decoded() -> None:
    """The client learns when to try again; what ends makes room."""
    free = asyncio.Event()

    async def handle(body: Counted) -> int:
        await free.wait()
        return len(body.texts)

    async def run() -> None:
        app, client = serve(handle)
        queues: BodyQueues = app.state.body_queues
        queues.long = BodyQueue(1, most=500_000)
        async with client:
            asked = [asyncio.create_task(client.post("/", json=MANY)) for _ in range(3)]
            await settle()
            refused = asyncio.create_task(client.post("/", json=MANY))
            await settle()
            assert refused.done()
            busy = refused.result()
            assert busy.status_code == 429
            assert busy.headers["retry-after"] == "1"
            assert busy.json()["error"]["code"] == "queue_full"
            assert Validated.number == 1
            asked.pop().cancel()
            await settle()
            asked.append(asyncio.create_task(client.post("/", json=MANY)))
            await settle()
            free.set()
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert queues.long.num_waiting == 0

    asyncio.run(run())


def test_a_queue_has_room_to_the_last_character() -> None:
    async def run() -> None:
        queue, place = BodyQueue(10, most=100), ExitStack()
        await queue.enter(60, place)
        with pytest.raises(EngineBusy, match=r"60 characters .* adds 41, the limit is 100"):
            await queue.enter(41, ExitStack())
        await queue.enter(40, place)
        assert queue.num_waiting == 100
        place.close()
        await queue.enter(1000, place)
        assert queue.num_waiting == 1000, "a body that is alone may be longer than the limit"
        place.close()
        assert queue.num_waiting == 0

    asyncio.run(run())
