"""The closed loop of the load tests."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from loadtest import client
from loadtest.client import Sample, closed_loop
from loadtest.workload import Prompt


def test_a_rate_counts_what_came_while_all_requests_were_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, answers of 2, 7 and 2 tokens: when the two short ones have ended, three of the long one."""

    async def stream_one(_: Any, path: str, body: dict[str, Any], receive: Callable[[int], None]) -> Sample:
        del path
        for _turn in range(body["length"]):
            await asyncio.sleep(0)
            receive(1)
        return Sample(body["length"], 0.0, 0.0, None)

    monkeypatch.setattr(client, "_stream_one", stream_one)
    prompts = [Prompt("/v1/completions", {"length": length}) for length in (2, 7, 2)]
    result = asyncio.run(closed_loop("http://nowhere", "model", prompts, 2, {}))
    assert result.num_tokens == 7
    assert sorted(sample.num_tokens for sample in result.samples) == [2, 2, 7]
    assert result.tokens_per_second == result.num_tokens / result.busy_s


def test_more_workers_than_prompts_do_not_end_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one prompt counts the whole answer, whatever the concurrency."""

    async def stream_one(_: Any, path: str, body: dict[str, Any], receive: Callable[[int], None]) -> Sample:
        del path, body
        await asyncio.sleep(0)
        receive(3)
        return Sample(3, 0.0, 0.0, None)

    monkeypatch.setattr(client, "_stream_one", stream_one)
    result = asyncio.run(closed_loop("http://nowhere", "model", [Prompt("/v1/completions", {})], 8, {}))
    assert result.num_tokens == 3
