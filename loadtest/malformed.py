"""`python -m loadtest.malformed`: effect of a thousand malformed requests per second on another client's stream.

Seconds with and without malformed requests alternate, and the gaps between the stream's chunks are noted in both.
Every malformed request must get a 4xx response.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from tqdm import tqdm

from loadtest.client import key_headers
from loadtest.daemon import running_daemon
from loadtest.environment import environment
from loadtest.results import add_output_argument, write

_CONNECTIONS = 8
_BODIES = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"model": 5}',
    b'{"model": "nobody", "messages": []}',
    b'{"model": "polydraft-demo", "messages": [{"role": "nobody", "content": 1}]}',
    b'{"model": "polydraft-demo", "messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
    b'{"a":' * 500,
    b"\xff" * 1000,
    b'{"no_such_field": "' + b"x" * 20_000 + b'"}',
)


@dataclass
class Turns:
    """Current phase, and the observations in each."""

    sends: bool = False
    gaps_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    statuses: Counter[int] = field(default_factory=Counter)


def request(host: str, body: bytes) -> bytes:
    """Return a request as bytes."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


async def send(host: str, port: int, rate: float, turns: Turns, first: int) -> None:
    """Send one connection's malformed requests at its share of the rate until cancelled."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        number, due = first, time.monotonic()
        while True:
            if not turns.sends:
                await asyncio.sleep(0.05)
                due = time.monotonic()
                continue
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(request(host, _BODIES[number % len(_BODIES)]))
            number += 1
            head = await reader.readuntil(b"\r\n\r\n")
            turns.statuses[int(head.split()[1])] += 1
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read(url: str, model: str, turns: Turns) -> None:
    """Read streams and note the gaps between their chunks until cancelled."""
    body = {"model": model, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=60) as client:
        while True:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                last: float | None = None
                async for _ in answer.aiter_raw():
                    now = time.perf_counter()
                    if last is not None:
                        turns.gaps_s[turns.sends].append(now - last)
                    last = now


async def measure(
    url: str, rate: float, num_turns: int, model: str = "polydraft-demo", turn_s: float = 5.0
) -> dict[str, Any]:
    """Alternate the phases, and return the numbers of requests and the gaps."""
    parts = urlsplit(url)
    turns = Turns()
    host, port = str(parts.hostname), int(parts.port or 80)
    tasks = [asyncio.create_task(read(url, model, turns))]
    tasks += [asyncio.create_task(send(host, port, rate / _CONNECTIONS, turns, i)) for i in range(_CONNECTIONS)]
    sent_s = 0.0
    for number in tqdm(range(num_turns), unit="turn", disable=None):
        turns.sends = number % 2 == 1
        began = time.monotonic()
        await asyncio.wait(tasks, timeout=turn_s, return_when=asyncio.FIRST_EXCEPTION)
        sent_s += (time.monotonic() - began) * turns.sends
        if broken := next((task for task in tasks if task.done()), None):
            broken.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "sent_per_second": sum(turns.statuses.values()) / sent_s,
        "statuses": dict(turns.statuses),
        "gaps_ms": {name: summary(turns.gaps_s[sends]) for name, sends in (("alone", False), ("beside", True))},
    }


def summary(gaps_s: list[float]) -> dict[str, float]:
    """Return some quantiles."""
    gaps_ms = 1000 * np.array(gaps_s)
    quantiles = {f"p{share}": float(np.percentile(gaps_ms, share)) for share in (50, 99)}
    return {"count": len(gaps_s), **quantiles, "longest": float(gaps_ms.max())}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.malformed", description=__doc__)
    parser.add_argument("--rate", type=float, default=1000, help="malformed requests a second")
    parser.add_argument("--turns", type=int, default=12, help="turns of five seconds, every other one with them")
    add_output_argument(parser)
    options = parser.parse_args()
    with running_daemon(["--num-threads", "1"]) as url:
        found = {"environment": environment(), **asyncio.run(measure(url, options.rate, options.turns))}
    print(json.dumps(found, indent=1))
    write(found, options.output)
    return 0 if all(400 <= status < 500 for status in found["statuses"]) else 1


if __name__ == "__main__":
    sys.exit(main())
