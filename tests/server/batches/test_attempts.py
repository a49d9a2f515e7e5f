"""Attempts of one work: they draw the same numbers, and wait for other requests without an end."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.api import EngineBusy, Request, SpeculationConfig
from server.batches.endpoint import LINE_PRIORITY, LineEndpoint
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


def requests_of(
    name: str, device: str = "cpu", is_one_of_many: bool = False, seed_shape: Any = None, **fields: Any
) -> list[Request]:
    """The engine requests of an attempt of the work with a name; "" for any other call."""
    limits = SpeculationConfig(num_drafts=4, draft_length=5, adaptive=True, seed_shape=seed_shape)
    client = SimpleNamespace(
        ready_facts=lambda: facts("model", device=device),
        config=SimpleNamespace(speculation=limits),
        check_count=lambda count: None,
    )
    settings = SimpleNamespace(seed_stable=False)
    server = SimpleNamespace(client=client, defaults=GenerationDefaults(), settings=settings)
    body = CompletionRequest.model_validate({"prompt": "x", **fields})
    before = current_call.set(HttpCall("", "", attempt_of=name, is_one_of_many=is_one_of_many))
    try:
        return engine_requests(cast(Any, server), body, Prepared([[1, 2]], [9]))
    finally:
        current_call.reset(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attempts_of_one_work_draw_the_same_numbers(device: str) -> None:
    """Each choice has its own numbers. Drafts have one shape, because the load of the attempts
    differs.
    """
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


def test_fields_of_a_body_hold_in_each_attempt() -> None:
    """A drafter that depends on other answers is accepted, and does not draft."""
    (request,) = requests_of("line", seed=7)
    assert request.sampling.seed == 7
    (request,) = requests_of("line", speculation={"drafters": ["earlier_answers"]})
    assert not request.speculation.adaptive
    (request,) = requests_of("line", temperature=0)
    assert request.speculation.adaptive, "no shape can change its answer"


def test_one_of_many_attempts_does_not_draft() -> None:
    """Unless the body or the server has a shape for it, or no shape can change its answer."""
    many = partial(requests_of, "line", is_one_of_many=True)
    (request,) = many()
    assert (request.speculation.adaptive, request.speculation.num_drafts) == (False, 0)
    asked = {"num_drafts": 2, "draft_length": 3}
    shaped = (many(seed_shape=(1, 3)), many(speculation=asked), many(seed=7), many(temperature=0))
    shapes = [request.speculation for (request,) in shaped]
    assert [(one.num_drafts, one.draft_length, one.adaptive) for one in shapes] == [
        (1, 3, False),
        (2, 3, False),
        (1, 4, False),
        (1, 5, True),
    ]


@pytest.mark.parametrize(("at_once", "is_one_of_many"), [(15, False), (16, True)])
def test_calls_of_a_line_have_its_name_and_the_last_priority(at_once: int, is_one_of_many: bool) -> None:
    calls: list[HttpCall] = []

    async def received(*_: Any) -> Any:
        calls.append(this_call())
        return SimpleNamespace(status=200, body=b"{}")

    endpoint = LineEndpoint(cast(Any, SimpleNamespace(settings=Serve())), at_once)
    with instead(LineEndpoint, "_received", received):
        asyncio.run(endpoint.answer(LineRequest("/v1/completions", b"{}"), "me", "line"))
    (call,) = calls
    assert (call.attempt_of, call.client, call.added_priority) == ("line", "me", LINE_PRIORITY)
    assert call.is_one_of_many == is_one_of_many


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
