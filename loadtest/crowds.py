"""`python -m loadtest.crowds`: effect of hundreds of small requests at once on a stream and on
/health.

`costs.py` sends few large bodies. Here each body is small, and its number of objects makes it dear.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.client import address_of, raw_request
from loadtest.cost_bodies import filled
from loadtest.costs import SETTLE_S, Neighbour, neighbour_of
from loadtest.daemon import in_folder, running_daemon
from loadtest.environment import environment
from loadtest.results import add_output_argument, table, write

SIZES = (20, 60, 200, 500)
_MODEL = "crowds"
_CHAT = "/v1/chat/completions"
_ANSWER_TIMEOUT_S = 180.0


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _function(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object"}}}


def bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """Return path and body of each kind of small request that takes long."""
    fields: dict[str, tuple[str, Any]] = {
        "1,301 messages": ("messages", [{"role": "user", "content": "a"}] * 1301),
        "600 messages, answered": ("messages", [{"role": "user", "content": "a"}] * 600),
        "512 tools": ("tools", [_function(number) for number in range(512)]),
        "a deep schema": (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": _deep(40)}},
        ),
        "4,000 stop tokens": ("stop_token_ids", list(range(4000))),
    }
    return {name: (_CHAT, filled(_CHAT, model, field, json.dumps(value))) for name, (field, value) in fields.items()}


async def _exchange(address: tuple[str, int], request: bytes) -> str:
    """Send a request on a new connection, and return the status of the response or the name of an
    error.
    """
    try:
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(request)
            line = await reader.readline()
            await reader.read()
        finally:
            writer.close()
        return line.split()[1].decode()
    except (OSError, IndexError) as error:
        return type(error).__name__


async def _all_at_once(address: tuple[str, int], request: bytes, at_once: int) -> dict[str, int]:
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        return dict(Counter(await asyncio.gather(*(_exchange(address, request) for _ in range(at_once)))))


def measure_crowds(
    url: str, asked: Mapping[str, tuple[str, bytes]], neighbour: Neighbour, sizes: Sequence[int] = SIZES
) -> list[dict[str, Any]]:
    """Send each of these requests (path and body by name) in crowds of each size."""
    found = []
    for name, (path, body) in asked.items():
        for at_once in sizes:
            neighbour.seen()
            began = time.perf_counter()
            statuses = asyncio.run(_all_at_once(address_of(url), raw_request(path, body, "close"), at_once))
            answer_s = time.perf_counter() - began
            time.sleep(SETTLE_S)
            cost = {"kind": name, "size_bytes": len(body), "at_once": at_once, "statuses": statuses}
            found.append({**cost, "answer_s": answer_s, "neighbour": neighbour.seen()})
    return found


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of crowds."""
    head = ["small requests", "size", "at once", "answers", "s", "longest gap, ms", "longest /health, ms"]
    rows = [
        [
            cost["kind"],
            f"{cost['size_bytes'] / 1000:.0f} kB",
            str(cost["at_once"]),
            ", ".join(f"{count} {status}" for status, count in sorted(cost["statuses"].items())),
            f"{cost['answer_s']:.1f}",
            f"{cost['neighbour']['longest_gap_ms']:.0f}",
            f"{cost['neighbour']['longest_health_ms']:.0f}",
        ]
        for cost in found
    ]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.crowds", description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="requests at once, comma-separated")
    parser.add_argument("--kinds", help="send only these requests, separated by semicolons (default: all)")
    parser.add_argument("--before", type=Path, help="checkout of another version, which is measured first")
    parser.add_argument("--serve-args", default="--num-threads 1", help="arguments of `polydraft serve`, in one string")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    asked = bodies(_MODEL)
    if options.kinds:
        asked = {name: asked[name] for name in options.kinds.split(";")}
    words = [*options.serve_args.split(), "--served-model-name", f"costs,{_MODEL}"]
    result: dict[str, Any] = {"environment": environment()}
    checkouts = {"before": in_folder(options.before)} if options.before else {}
    for name, prefix in {**checkouts, "crowds": ()}.items():
        with running_daemon(words, prefix) as url, neighbour_of(url) as neighbour:
            result[name] = measure_crowds(url, asked, neighbour, sizes)
        print(name, markdown(result[name]), sep="\n")
    write(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
