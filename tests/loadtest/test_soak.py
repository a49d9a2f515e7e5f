"""The soak, in small: a real daemon, and requests that fail."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest import soak
from tests.wrong import instead


@pytest.mark.slow
def test_memory_is_reported_and_no_block_is_held(tmp_path: Path) -> None:
    assert soak.main(["--requests", "40", "--concurrency", "8", "--output", str(tmp_path / "soak.json")]) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["faults"] == []
    assert result["blocks_held_at_idle"] == 0
    assert [point["requests"] for point in result["points"]] == list(range(0, 41, 2))
    assert all(point["engine_mib"] > point["server_mib"] > 20 for point in result["points"])


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (httpx.Response(503, text="loading"), "RuntimeError: loading"),
        (httpx.Response(200, text='data: {"error": {"message": "it broke"}}\n\n'), "it broke"),
        (httpx.ReadError("gone"), "ReadError: gone"),
    ],
    ids=["refused", "broken off", "no daemon"],
)
def test_requests_that_fail_are_faults(response: Any, fault: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response.status_code, text=response.text)

    def unreal(client: Any, **options: Any) -> httpx.AsyncClient:
        return client(**options, transport=httpx.MockTransport(answer))

    with instead(httpx, "AsyncClient", unreal):
        faults = asyncio.run(soak.batch("http://nowhere", "model", 3, 2, random.Random(1)))
    assert len(faults) == 3
    assert all(fault in one for one in faults)
