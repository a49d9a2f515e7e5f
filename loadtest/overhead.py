"""`python -m loadtest.overhead`: overhead of HTTP on top of the engine's steps.

While requests are open the engine always has work. The time of a run divided by the time of its
steps, from the daemon's metrics, is the overhead per token. Answers of one token, one at a time,
show the time before the first token. The CPU time of the HTTP process is divided by the number of
chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import uuid
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from tqdm import tqdm

from loadtest.arguments import integers
from loadtest.bench import environment
from loadtest.client import closed_loop, metric, served_model
from loadtest.daemon import running_daemon
from loadtest.results import add_output_argument, table, write
from loadtest.workload import Prompt, load, random_prompts

_ARMS: dict[str, dict[str, Any]] = {"off": {"enabled": False}, "adaptive": {}}
_LEAST_ANSWERS, _ANSWERS = 6, 3
"""Number of answers of a run: the minimum, and the number per open request."""
_FIRST_TOKENS, _FIRST_PROMPT = 60, 64
"""Number of answers of one token, and number of tokens of their prompts."""
_NAME = "overhead"


def step_seconds(url: str) -> float:
    """Return the time of the engine's steps since the daemon's start."""
    return metric(url, "polydraft_step_seconds_sum")


def cpu_seconds(url: str) -> float:
    """Return the CPU time of the HTTP process."""
    return metric(url, "process_cpu_seconds_total")


def measure(url: str, concurrency: Sequence[int], num_rounds: int, max_tokens: int) -> dict[str, Any]:
    """Measure both arms in turn, `num_rounds` runs of each, and the time before the first token."""
    model = served_model(url)
    cells = []
    for at_once in concurrency:
        prompts = list(islice(cycle(load("dialogues")), max(_LEAST_ANSWERS, _ANSWERS * at_once)))
        runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in _ARMS}
        for number in tqdm(range(num_rounds + 1), desc=f"rounds at {at_once}", unit="round"):
            for arm, speculation in _ARMS.items():
                found = _run(url, model, prompts, at_once, {"max_tokens": max_tokens, "speculation": speculation})
                if number:  # the first warms up
                    runs[arm].append(found)
        cells.append({"concurrency": at_once, "arms": {arm: spreads(found) for arm, found in runs.items()}})
    return {
        "what": "time over HTTP over that of the engine's steps, CPU time of the HTTP process, time to a first token",
        "options": {"num_rounds": num_rounds, "max_tokens": max_tokens, "arms": _ARMS},
        "environment": environment(url),
        "cells": cells,
        "first_token": _first_token(url, model),
    }


def _run(url: str, model: str, prompts: list[Prompt], concurrency: int, asked: dict[str, Any]) -> dict[str, float]:
    options = {"temperature": 1, "ignore_eos": True, "seed": None, "cache_salt": uuid.uuid4().hex, **asked}
    step_s, cpu_s = step_seconds(url), cpu_seconds(url)
    run = asyncio.run(closed_loop(url, model, prompts, concurrency, options))
    step_s, cpu_s = step_seconds(url) - step_s, cpu_seconds(url) - cpu_s
    return {
        "time_over_steps": run.total_s / step_s,
        "cpu_us_per_event": 1e6 * cpu_s / run.num_events,
        "tokens_per_event": sum(sample.num_tokens for sample in run.samples) / run.num_events,
    }


def spreads(runs: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return median and range of each figure."""
    figures = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
        for name, values in figures.items()
    }


def _first_token(url: str, model: str) -> dict[str, float]:
    """Return the milliseconds from request to first token without the engine's step."""
    prompts = random_prompts(_FIRST_PROMPT, _FIRST_TOKENS)
    asked = {"max_tokens": 1, "temperature": 1, "ignore_eos": True, "speculation": _ARMS["off"]}
    asyncio.run(closed_loop(url, model, random_prompts(_FIRST_PROMPT, 5, seed=1), 1, asked))
    step_s = step_seconds(url)
    run = asyncio.run(closed_loop(url, model, prompts, 1, asked))
    step_s = (step_seconds(url) - step_s) / len(prompts)
    waits = sorted(1e3 * (sample.first_token_s - step_s) for sample in run.samples)
    return {
        "p50_ms": statistics.median(waits),
        "p90_ms": statistics.quantiles(waits, n=10)[-1],
        "step_ms": 1e3 * step_s,
    }


def markdown(result: dict[str, Any]) -> str:
    """Return a row per concurrency and arm."""
    head = ["c", "arm", "time over that of the steps", "CPU time of the HTTP process a chunk", "tokens a chunk"]
    rows = []
    for cell in result["cells"]:
        for arm, found in cell["arms"].items():
            times, cpu, tokens = found["time_over_steps"], found["cpu_us_per_event"], found["tokens_per_event"]
            shown = f"{times['median']:.3f} ({times['low']:.3f}-{times['high']:.3f})"
            rows.append([cell["concurrency"], arm, shown, f"{cpu['median']:.0f} us", f"{tokens['median']:.2f}"])
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a daemon on the embedded pair or on named models; print and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="target of the daemon (default: the embedded pair)")
    parser.add_argument("--draft-model", help="its draft model")
    parser.add_argument("--concurrency", type=integers, default=[1, 64], help="requests open at once (default 1,64)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each arm (default 5)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of every answer (default 96)")
    add_output_argument(parser)
    options = parser.parse_args(arguments)
    words = [*([options.model] if options.model else []), "--calibrate", "--served-model-name", _NAME]
    words += ["--draft-model", options.draft_model] if options.draft_model else []
    with running_daemon(words) as url:
        result = measure(url, options.concurrency, options.rounds, options.max_tokens)
    write(result, options.output)
    print(markdown(result))
    print(
        "before the first token, without its step: {p50_ms:.1f} ms (p90 {p90_ms:.1f})".format(**result["first_token"])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
