"""Attempts of one work: they draw the same numbers, and wait for other requests without an end."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.api import EngineBusy, Request, SpeculationConfig
from server.batches.endpoint import LINE_PRIORITY, LineEndpoint, shape_of_lines
from server.batches.lines import LineRequest
from server.openai.preparing import Prepared, engine_requests
from server.serving.engine_client import UNATTENDED, EngineClient, EngineState
from server.settings.settings import Serve
from server.text.tokenizer import GenerationDefaults
from server.wire.current_call import HttpCall, current_call, this_call
from server.wire.fields import CompletionRequest
from server.wire.ids import seed_of
from tests.server.step_results import facts
from tests.wrong import instead


def requests_of(name: str, device: str = "cpu", shape: tuple[int, int] = (1, 4), **fields: Any) -> list[Request]:
    """The engine requests of an attempt of the work with a name; "" for any other call."""
    limits = SpeculationConfig(num_drafts=4, draft_length=5, adaptive=True)
    client = SimpleNamespace(
        ready_facts=lambda: facts("model", device=device),
        config=SimpleNamespace(speculation=limits),
        check_count=lambda count: None,
    )
    settings = SimpleNamespace(seed_stable=False)
    server = SimpleNamespace(client=client, defaults=GenerationDefaults(), settings=settings)
    body = CompletionRequest.model_validate({"prompt": "x", **fields})
    before = current_call.set(HttpCall("", "", attempt_of=name, shape=shape))
    try:
        return engine_requests(cast(Any, server), body, Prepared([[1, 2]], [9]))
    finally:
        current_call.reset(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attempts_of_one_work_draw_the_same_numbers(device: str) -> None:
    """Drafts have one shape, because the load of the attempts differs."""
    first, second = (requests_of("line", device, n=2) for _ in range(2))
    seeds = [request.sampling.seed for request in first]
    assert seeds == [request.sampling.seed for request in second]
    assert seeds[0] == seed_of("line")
    assert len({*seeds, *(request.sampling.seed for request in requests_of("other", n=2))}) == 4
    speculation = first[0].speculation
    assert (speculation.adaptive, speculation.num_drafts, speculation.draft_length) == (False, 1, 4)


def test_other_calls_draw_new_numbers() -> None:
    (first,), (second,) = requests_of(""), requests_of("")
    assert first.sampling.seed != second.sampling.seed
    assert first.speculation.adaptive


@pytest.mark.parametrize("shape", [(0, 0), (1, 3)])
def test_fields_of_a_body_hold_in_each_attempt(shape: tuple[int, int]) -> None:
    """Drafts have the shape of the work, unless the body has another or its answer is certain.

    A drafter that depends on other answers is accepted, and does not draft.
    """
    attempt = partial(requests_of, "line", shape=shape)
    assert attempt(seed=7)[0].sampling.seed == 7
    asked, others = {"num_drafts": 2, "draft_length": 3}, {"drafters": ["earlier_answers"]}
    attempts = (attempt(), attempt(speculation=asked), attempt(seed=7), attempt(temperature=0))
    found = [request.speculation for (request,) in (*attempts, attempt(speculation=others))]
    shapes = [(*shape, False), (2, 3, False), (1, 4, False), (1, 5, True), (0, 0, False)]
    assert [(one.num_drafts, one.draft_length, one.adaptive) for one in found] == shapes


def test_many_lines_at_once_do_not_draft() -> None:
    assert [shape_of_lines(SpeculationConfig(), count) for count in (15, 16)] == [(1, 4), (0, 0)]
    assert shape_of_lines(SpeculationConfig(seed_shape=(2, 3)), 16) == (2, 3)


def test_calls_of_a_line_have_its_name_and_the_last_priority() -> None:
    calls: list[HttpCall] = []

    async def received(*_: Any) -> Any:
        calls.append(this_call())
        return SimpleNamespace(status=200, body=b"{}")

    endpoint = LineEndpoint(cast(Any, SimpleNamespace(settings=Serve())))
    with instead(LineEndpoint, "_received", received):
        asyncio.run(endpoint.answer(LineRequest("/v1/completions", b"{}"), "me", "line", (1, 3)))
    (call,) = calls
    found = (call.attempt_of, call.shape, call.client, call.added_priority)
    assert found == ("line", (1, 3), "me", LINE_PRIORITY)


def test_requests_that_nobody_waits_for_take_no_places_from_others() -> None:
    """They have no time limit, because they wait for others."""
    client = EngineClient(Serve().engine_config(), 2, request_timeout_s=0.01, max_queued_tokens=4)
    client.facts = facts()
    client.state = EngineState.ASLEEP

    def request(name: str, priority: int = 0) -> Request:
        return Request(request_id=name, prompt_token_ids=(1, 2), priority=priority)

    async def run() -> None:
        line = client.submit([request("line", UNATTENDED), request("more", UNATTENDED)])
        async with line as unattended, client.submit([request("a")]), client.submit([request("b")]):
            for priority in (0, UNATTENDED):
                with pytest.raises(EngineBusy):
                    await client.submit([request("c", priority)]).__aenter__()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(unattended.parts()), 0.05)

    asyncio.run(run())
