"""`python -m loadtest.honesty`: is the speedup that an answer reports the one that a plain rerun shows?

Each prompt is answered plainly, with speculation, and plainly again, at one number of requests open at once (one, or
those of `--concurrency`). What the answer with speculation reports is compared with the time of the two plain answers
over its own; the two plain ones show the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import uuid
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.bench import environment
from loadtest.cli import counts
from loadtest.client import Sample, closed_loop
from loadtest.daemon import running_daemon
from loadtest.workload import TASKS, Prompt, load

_ROUNDS = 4
"""Requests that are compared, by seat, where several are open at once."""
_PLAIN: dict[str, Any] = {"enabled": False}
_ARMS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "bv_race 4x5": {"rule": "bv_race", "num_drafts": 4, "draft_length": 5},
    "block 1x5": {"rule": "block", "num_drafts": 1, "draft_length": 5},
}


def measure(url: str, concurrency: Sequence[int], num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Errors of the reported speedup by requests at once and arm, and the noise."""
    model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    cells = []
    for at_once in concurrency:
        # Those answered last are not compared: nobody follows them, and the load they meet differs between arms.
        num_compared = max(num_prompts, _ROUNDS * at_once if at_once > 1 else 0)
        prompts = list(islice(cycle(_both_tasks()), num_compared + at_once))
        cells.append({"concurrency": at_once, **_cell(url, model, prompts, at_once, max_tokens)})
    return {
        "what": "speedup reported by an answer against that of a paired plain rerun",
        "options": {"num_prompts": num_prompts, "max_tokens": max_tokens, "arms": _ARMS},
        "environment": environment(url),
        "cells": cells,
    }


def _both_tasks() -> list[Prompt]:
    return [prompt for pair in zip(*map(load, TASKS), strict=False) for prompt in pair]


def _cell(url: str, model: str, prompts: list[Prompt], concurrency: int, max_tokens: int) -> dict[str, Any]:
    # One request at a time: the noise of the machine is the less, the nearer to each other the three answers are.
    size = 1 if concurrency == 1 else len(prompts)
    num_compared = len(prompts) - concurrency
    loads = [prompts[start : start + size] for start in range(0, num_compared, size)]

    def answers(load: list[Prompt], speculation: dict[str, Any]) -> tuple[Sample, ...]:
        # Nothing of an earlier run is in the cache: else the first of three would read the prompts for the others.
        salt = uuid.uuid4().hex
        options = {"max_tokens": max_tokens, "temperature": 1, "ignore_eos": True, "seed": None, "cache_salt": salt}
        run = closed_loop(url, model, load, concurrency, {**options, "speculation": speculation})
        return asyncio.run(run).samples[:num_compared]

    pairs: dict[str, list[dict[str, float]]] = {arm: [] for arm in _ARMS}
    noise: list[float] = []
    for arm in _ARMS:
        answers(prompts[:1], _ARMS[arm])
    for load_ in tqdm(loads, desc=f"prompts at {concurrency}", unit="load"):
        for arm, speculation in _ARMS.items():
            before, told, after = answers(load_, _PLAIN), answers(load_, speculation), answers(load_, _PLAIN)
            for one, sample, other in zip(before, told, after, strict=True):
                noise.append(abs(one.total_s / other.total_s - 1))
                pairs[arm] += _compared(one, sample, other)
    return {
        "noise_of_two_plain_runs": _spread(noise),
        "arms": {arm: _errors(found) | {"pairs": found} for arm, found in pairs.items()},
    }


def _compared(before: Sample, sample: Sample, after: Sample) -> list[dict[str, float]]:
    """Nothing where the controller let an answer be decoded plainly."""
    if sample.speculation is None:
        return []
    if sample.speculation["speedup"] is None:
        raise RuntimeError("an answer reports no speedup: start the daemon with --calibrate, ask for longer answers")
    actual = (before.total_s + after.total_s) / 2 / sample.total_s
    return [{"reported": sample.speculation["speedup"], "actual": actual}]


def _errors(pairs: Sequence[dict[str, float]]) -> dict[str, Any]:
    if len(pairs) < 2:
        return {}
    errors = [pair["reported"] / pair["actual"] - 1 for pair in pairs]
    return {"error": statistics.median(errors), "absolute_error": _spread([abs(error) for error in errors])}


def markdown(result: dict[str, Any]) -> str:
    """A row per arm and number of requests at once; and one for plain answers beside plain ones."""
    lines = ["| c | arm | error (median) | absolute error, median | 90 % of answers |", "|" + " --- |" * 5]
    for cell in result["cells"]:
        for arm, found in cell["arms"].items():
            error = f"{found['error']:+.1%}" if "error" in found else f"{len(found['pairs'])} answers had drafts"
            lines.append(f"| {cell['concurrency']} | {arm} | {error} | {_shown(found.get('absolute_error'))} |")
        noise = _shown(cell["noise_of_two_plain_runs"])
        lines.append(f"| {cell['concurrency']} | plain beside plain | | {noise} |")
    return "\n".join(lines)


def _shown(spread: dict[str, float] | None) -> str:
    return f"{spread['median']:.1%} | {spread['p90']:.1%}" if spread else "- | -"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p90": statistics.quantiles(values, n=10)[-1]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a daemon on the embedded pair, or the one that is named."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.honesty", description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="daemon to measure; without it one is started on the embedded pair")
    parser.add_argument(
        "--concurrency",
        type=counts,
        default=[1],
        help="requests open at once, as 1,4,16 (default 1)",
    )
    parser.add_argument(
        "--prompts", type=int, default=20, help="prompts, each answered three times in each arm (default 20)"
    )
    parser.add_argument("--max-tokens", type=int, default=192, help="tokens of every answer (default 192)")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    try:
        if options.url:
            result = measure(options.url.rstrip("/"), options.concurrency, options.prompts, options.max_tokens)
        else:
            with running_daemon([]) as url:
                result = measure(url, options.concurrency, options.prompts, options.max_tokens)
    except RuntimeError as error:
        print(f"honesty: {error}", file=sys.stderr)
        return 1
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
