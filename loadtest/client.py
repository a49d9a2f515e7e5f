"""Closed-loop client: a constant number of requests is open, and each is followed by the next.

A rate is measured only while all of them are open. Afterwards the load falls as answers end one by
one, and more so if their speeds differ (plain answers of one length all end in the same step).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.workload import Prompt

_TIMEOUT_S = 600.0


def key_headers() -> dict[str, str]:
    """Return the header with the API key of `POLYDRAFT_API_KEY`, if it is set.

    With several keys, it has the first.
    """
    key = os.environ.get("POLYDRAFT_API_KEY", "").split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def metric(url: str, name: str) -> float:
    """Return a metric of the daemon, summed over its labels.

    Raises RuntimeError if it does not exist.
    """
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").raise_for_status().text)
    values = [sample.value for family in families for sample in family.samples if sample.name == name]
    if not values:
        raise RuntimeError(f"the daemon has no metric {name}")
    return sum(values)


def resident_mib(url: str) -> dict[str, int]:
    """Return the resident memory of both processes of the daemon."""
    names = {"engine_mib": "polydraft_engine_process", "server_mib": "process"}
    return {key: int(metric(url, f"{name}_resident_memory_bytes")) >> 20 for key, name in names.items()}


def served_model(url: str) -> str:
    """Return the name of the daemon's model. Raises RuntimeError if it cannot be measured now."""
    response = httpx.get(f"{url}/v1/models", headers=key_headers())
    if response.status_code == 401:
        raise RuntimeError(f"{url} needs an API key; set POLYDRAFT_API_KEY in the environment")
    if not response.is_success:
        raise RuntimeError(f"{url} answered {response.status_code}: {response.text}")
    return str(response.json()["data"][0]["id"])


def address_of(url: str) -> tuple[str, int]:
    """Return the daemon's host and port."""
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 80)


def raw_request(path: str, body: bytes, connection: str = "keep-alive") -> bytes:
    """Return a POST of JSON as bytes."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: {connection}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class Refused(RuntimeError):
    """A request that is not answered with 200."""


@dataclass(frozen=True)
class Sample:
    """Answered request with the client's measurements."""

    num_tokens: int
    first_token_s: float
    total_s: float
    speculation: dict[str, Any] | None


@dataclass(frozen=True)
class RunResult:
    """Result of a closed-loop run."""

    busy_s: float
    """Time until all requests had been sent."""
    num_tokens: int
    """Number of tokens of all answers by then."""
    samples: tuple[Sample, ...]
    """Answers in the order of the prompts, also those that ended later."""
    total_s: float = 0.0
    """Time until the end of the last answer."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second at the requested concurrency."""
        return self.num_tokens / self.busy_s


async def closed_loop(
    url: str, model: str, prompts: Sequence[Prompt], concurrency: int, options: dict[str, Any]
) -> RunResult:
    """Send every prompt once, `concurrency` at a time; raises RuntimeError if one fails."""
    queue = list(enumerate(prompts))[::-1]
    samples: dict[int, Sample] = {}
    busy: list[tuple[float, int]] = []
    received: list[int] = []
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=_TIMEOUT_S, limits=limits) as client:

        async def worker() -> None:
            while queue:
                number, prompt = queue.pop()
                body = {"model": model, "seed": number, **prompt.body, **options}
                samples[number] = await _stream_one(client, prompt.path, body, received.append)
            busy.append((time.perf_counter() - began, sum(received)))

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(min(concurrency, len(prompts)))))
        answered = tuple(samples[number] for number in range(len(prompts)))
        return RunResult(*busy[0], answered, time.perf_counter() - began)


async def _stream_one(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], receive: Callable[[int], None]
) -> Sample:
    """Send a request; `receive` gets the number of tokens of each chunk."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    began = time.perf_counter()
    first_s: float | None = None
    last: dict[str, Any] = {}
    num_tokens = 0
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            detail = (await response.aread()).decode(errors="replace")
            raise Refused(f"{path} answered {response.status_code}: {detail}")
        if (most := response.headers.get("x-polydraft-max-tokens")) is not None:
            wanted = body.get("max_tokens")
            raise RuntimeError(f"the context has room for {most} of {wanted} answer tokens; shorten prompts or answers")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            last = json.loads(line.removeprefix("data: "))
            if "error" in last:
                raise RuntimeError(f"{path} broke off: {last['error']['message']}")
            # Other servers count at the end only; until then a chunk of text is one token.
            usage = last.get("usage") or {}
            counted = usage.get("completion_tokens", num_tokens + _has_text(last))
            receive(counted - num_tokens)
            num_tokens = counted
            if first_s is None and _has_text(last):
                first_s = time.perf_counter() - began
    total_s = time.perf_counter() - began
    metrics = last.get("metrics") or {}
    return Sample(
        num_tokens=num_tokens,
        first_token_s=total_s if first_s is None else first_s,
        total_s=total_s,
        speculation=metrics.get("speculative_decoding"),
    )


def _has_text(chunk: dict[str, Any]) -> bool:
    deltas = [choice.get("delta", {}) for choice in chunk["choices"]]
    texts = [choice.get("text") for choice in chunk["choices"]]
    return any((*texts, *(delta.get(kind) for delta in deltas for kind in ("content", "reasoning_content"))))


async def whole_text(url: str, model: str, prompt: Prompt, options: dict[str, Any]) -> str:
    """Return the text of one whole answer, its thoughts first."""
    async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=_TIMEOUT_S) as client:
        response = await client.post(prompt.path, json={"model": model, **prompt.body, **options})
        response.raise_for_status()
        choice = response.json()["choices"][0]
    if "text" in choice:
        return str(choice["text"])
    parts = [choice["message"].get(kind) or "" for kind in ("reasoning_content", "content")]
    if not any(parts):
        raise RuntimeError(f"{prompt.path} returned no text, so that answers cannot be compared; ask for more tokens")
    return "\n".join(parts)
