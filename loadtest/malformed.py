"""`python -m loadtest.malformed`: effect of a thousand malformed requests per second on another
client's stream.

Seconds with and without malformed requests alternate, and the gaps between the stream's chunks are
noted in both. Every malformed request must get a 4xx response.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import httpx

from loadtest.client import address_of, key_headers, raw_request
from loadtest.daemon import running_daemon
from loadtest.environment import environment
from loadtest.neighbour import Disturbance
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


async def send(address: tuple[str, int], rate: float, turns: Disturbance, first: int) -> None:
    """Send one connection's malformed requests at its share of the rate until cancelled."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        number, due = first, time.monotonic()
        while True:
            if not turns.is_on:
                await asyncio.sleep(0.05)
                due = time.monotonic()
                continue
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(raw_request("/v1/chat/completions", _BODIES[number % len(_BODIES)]))
            number += 1
            head = await reader.readuntil(b"\r\n\r\n")
            turns.statuses[head.split()[1].decode()] += 1
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def measure(
    url: str, rate: float, num_turns: int, model: str = "polydraft-demo", turn_s: float = 5.0
) -> dict[str, Any]:
    """Alternate the phases, and return the numbers of requests and the gaps."""
    turns = Disturbance()
    senders = [send(address_of(url), rate / _CONNECTIONS, turns, number) for number in range(_CONNECTIONS)]
    async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=60) as client:
        sent_s = await turns.alternate([turns.watch(client, model), *senders], [turn_s] * num_turns)
    sent_per_second = sum(turns.statuses.values()) / sent_s
    return {"sent_per_second": sent_per_second, "statuses": dict(turns.statuses), "gaps_ms": turns.gaps_ms()}


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
    return 0 if all(status.startswith("4") for status in found["statuses"]) else 1


if __name__ == "__main__":
    sys.exit(main())
