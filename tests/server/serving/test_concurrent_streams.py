"""Many streams at once: all finish, and none takes anything from its neighbours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.server.daemon_process import MODEL, Daemon
from tests.server.event_stream import DONE

NUM_STREAMS = 64
PATH = "/v1/completions"


def call_of(number: int) -> dict[str, Any]:
    """A call that differs from the others in prompt, seed, length, sampling and speculation."""
    speculations: list[dict[str, Any]] = [
        {"enabled": False},
        {"rule": "bv_race"},
        {"rule": "block"},
        {"num_drafts": 2, "draft_length": 3},
    ]
    return {
        "model": MODEL,
        "prompt": [1] + [3 + 7 * number] * (1 + number % 40),
        "seed": number,
        "max_tokens": 6 + number % 12,
        "temperature": (0, 0.7, 1)[number % 3],
        "speculation": speculations[number % 4],
        "ignore_eos": True,
    }


async def stream_text(client: httpx.AsyncClient, number: int) -> str:
    """The joined text of a stream that must end properly."""
    text, reason, last = "", None, ""
    async with client.stream("POST", PATH, json={**call_of(number), "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                assert not line, line
                continue
            last = line.removeprefix("data: ")
            if last != DONE:
                (choice,) = json.loads(last)["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    assert (last, reason) == (DONE, "length")
    return text


async def all_at_once(url: str) -> list[str]:
    """The texts of all streams, opened together."""
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(stream_text(client, number) for number in range(NUM_STREAMS)))


@pytest.mark.sole("many streams at once")
def test_many_streams_give_what_each_gives_alone(daemon: Daemon, http: httpx.Client) -> None:
    """64 streams at once finish, each with the text the same seed gives when nothing else runs."""
    together = asyncio.run(all_at_once(daemon.url))
    assert len(set(together)) == NUM_STREAMS
    alone = [http.post(PATH, json=call_of(number)).json()["choices"][0]["text"] for number in range(NUM_STREAMS)]
    assert together == alone
