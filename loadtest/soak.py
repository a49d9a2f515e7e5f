"""`python -m loadtest.soak`: memory and cache after many short requests.

A daemon on the embedded pair streams answers of a few tokens, some with several choices,
predictions or a grammar; a tenth of the clients leave early. The resident memory of both processes
is read while the daemon is idle, when no cache block may be held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.bench import environment
from loadtest.client import key_headers, metric, resident_mib
from loadtest.daemon import running_daemon
from loadtest.results import add_output_argument, document, write
from loadtest.workload import load

_EXTRAS: list[dict[str, Any]] = [
    {},
    {},
    {"n": 2},
    {"temperature": 0},
    {"prediction": {"type": "content", "content": "I think that would be nice."}},
    {"structured_outputs": {"regex": "(yes|no), [a-z]+"}},
    {"logprobs": 2},
    {"speculation": {"rule": "traversal", "tree": [2, 2, 1]}},
]


async def one_request(http: httpx.AsyncClient, body: dict[str, Any], leaves: bool) -> None:
    """Read a stream to its end, or leave after its first frame; raises RuntimeError if it
    breaks.
    """
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith('data: {"error"'):
                raise RuntimeError(f"a stream broke off: {line}")
            if leaves and line:
                return


async def batch(url: str, model: str, count: int, concurrency: int, generator: random.Random) -> list[str]:
    """Send requests, `concurrency` at a time, and return their errors."""
    faults: list[str] = []
    prompts = [str(prompt.body["prompt"]) for prompt in load("gutenberg")]
    left = count
    async with httpx.AsyncClient(
        base_url=url, headers=key_headers(), timeout=600, limits=httpx.Limits(max_connections=concurrency)
    ) as http:

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                prompt = generator.choice(prompts)
                start = generator.randrange(max(1, len(prompt) - 80))
                body = {"model": model, "prompt": prompt[start : start + 80], "max_tokens": generator.randint(1, 8)}
                try:
                    await one_request(http, {**body, **generator.choice(_EXTRAS)}, generator.random() < 0.1)
                except (RuntimeError, httpx.HTTPError) as error:
                    faults.append(f"{type(error).__name__}: {error}"[:400])

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write JSON; the exit code is 1 if a request failed or blocks are held when
    idle.
    """
    parser = argparse.ArgumentParser(prog="python -m loadtest.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="requests in all (default 20,000)")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once (default 32)")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    generator, points = random.Random(1), []
    faults: list[str] = []
    with running_daemon(["--served-model-name", "soak"]) as url, tqdm(total=options.requests, unit="request") as bar:
        step = max(1, options.requests // 20)
        for done in range(0, options.requests + 1, step):
            if done:
                faults += asyncio.run(batch(url, "soak", step, options.concurrency, generator))
                bar.update(step)
            points.append({"requests": done, **resident_mib(url)})
        usage = metric(url, "polydraft_kv_cache_usage_ratio")
        what = "resident memory over many short requests, a tenth of them left by their client"
        seen = {"points": points, "blocks_held_at_idle": usage, "faults": faults}
        result = document(what, options, environment=environment(url)) | seen
    print(json.dumps(result, indent=1))
    write(result, options.output)
    return int(usage != 0 or bool(faults))


if __name__ == "__main__":
    sys.exit(main())
