"""The closed loop of the load tests."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from loadtest import cli, client
from loadtest.client import Sample, closed_loop
from loadtest.workload import Prompt
from tests.wrong import instead


def test_a_rate_counts_what_came_while_all_requests_were_open() -> None:
    """Two workers, answers of 2, 7 and 2 tokens.

    When the two short answers have ended, three tokens of the long one are there.
    """

    async def stream_one(_: Any, _http: Any, _path: str, body: Any, receive: Callable[[int], None]) -> Sample:
        for _turn in range(body["length"]):
            await asyncio.sleep(0)
            receive(1)
        return Sample(body["length"], 0.0, 0.0, None)

    prompts = [Prompt("/v1/completions", {"length": length}) for length in (2, 7, 2)]
    with instead(client, "_stream_one", stream_one):
        result = asyncio.run(closed_loop("http://nowhere", "model", prompts, 2, {}))
    assert result.num_tokens == 7
    assert [sample.num_tokens for sample in result.samples] == [2, 7, 2], "in the order of the prompts"


def test_more_workers_than_prompts_do_not_end_the_run_at_once() -> None:
    """A run of one prompt counts the whole answer, whatever the concurrency."""

    async def stream_one(_: Any, _http: Any, _path: str, _body: Any, receive: Callable[[int], None]) -> Sample:
        await asyncio.sleep(0)
        receive(3)
        return Sample(3, 0.0, 0.0, None)

    with instead(client, "_stream_one", stream_one):
        result = asyncio.run(closed_loop("http://nowhere", "model", [Prompt("/v1/completions", {})], 8, {}))
    assert result.num_tokens == 3


@pytest.mark.parametrize(("keys", "sent"), [("", None), ("first, second", "Bearer first")])
def test_the_daemons_key_is_sent(monkeypatch: pytest.MonkeyPatch, keys: str, sent: str | None) -> None:
    monkeypatch.setenv("POLYDRAFT_API_KEY", keys)
    seen: list[str | None] = []

    async def stream_one(_: Any, http: httpx.AsyncClient, *_request: Any) -> Sample:
        seen.append(http.headers.get("Authorization"))
        return Sample(1, 0.0, 0.0, None)

    with instead(client, "_stream_one", stream_one):
        asyncio.run(closed_loop("http://nowhere", "model", [Prompt("/v1/completions", {})], 1, {}))
    assert seen == [sent]


def stream(*frames: dict[str, Any]) -> httpx.MockTransport:
    """A server that answers with these frames."""
    lines = [f"data: {json.dumps(frame)}\n\n" for frame in frames] + [": still there\n\n", "data: [DONE]\n\n"]
    return httpx.MockTransport(lambda _: httpx.Response(200, text="".join(lines)))


async def answer(transport: httpx.MockTransport) -> tuple[Sample, list[int]]:
    received: list[int] = []
    async with httpx.AsyncClient(base_url="http://nowhere", transport=transport) as http:
        return await client._stream_one(http, "/v1/completions", {}, received.append), received


def test_tokens_are_counted_as_they_come() -> None:
    """The usage counts all tokens so far.

    Some frames have several, the last none and the metrics.
    """
    frames = [
        {"choices": [{"text": "a"}], "usage": {"completion_tokens": 2}},
        {"choices": [{"text": "bc"}], "usage": {"completion_tokens": 5}},
        {
            "choices": [],
            "usage": {"completion_tokens": 5},
            "metrics": {"speculative_decoding": {"speedup": 2.0}},
        },
    ]
    sample, received = asyncio.run(answer(stream(*frames)))
    assert received == [2, 3, 0]
    assert sample.num_tokens == 5
    assert sample.first_token_s <= sample.total_s
    assert sample.speculation == {"speedup": 2.0}


def test_a_stream_that_breaks_off_is_no_sample() -> None:
    frames = [
        {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}},
        {"error": {"message": "the engine has stopped"}},
    ]
    with pytest.raises(RuntimeError, match="broke off: the engine has stopped"):
        asyncio.run(answer(stream(*frames)))
    refused = httpx.MockTransport(lambda _: httpx.Response(400, text="no such model"))
    with pytest.raises(RuntimeError, match="answered 400: no such model"):
        asyncio.run(answer(refused))


def test_a_server_that_counts_at_the_end_only_is_counted() -> None:
    """Chunks of text are a token each until the last chunk has the number, as in OpenAI's API."""
    chunks: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in ("a", "b", "")]
    chunks.append({"choices": [], "usage": {"completion_tokens": 3}})
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    received: list[int] = []

    async def run() -> Sample:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
        async with httpx.AsyncClient(base_url="http://other", transport=transport) as http:
            return await client._stream_one(http, "/v1/completions", {}, received.append)

    assert asyncio.run(run()).num_tokens == 3
    assert received == [1, 1, 0, 1]


@pytest.mark.parametrize(("status", "advice"), [(401, "set POLYDRAFT_API_KEY"), (503, "answered 503: still loading")])
def test_a_daemon_that_cannot_be_measured_says_why(status: int, advice: str) -> None:
    answer = httpx.Response(status, text="still loading")
    with instead(httpx, "get", lambda *_, **__: answer), pytest.raises(RuntimeError, match=advice):
        client.served_model("http://nowhere")


def test_an_address_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--short", "--url", "http://localhost:port"]) == 1
    assert "Invalid port: 'port' (http://localhost:port)" in capsys.readouterr().err
