"""`python -m loadtest.honesty`: is the speedup that an answer reports the one that a plain rerun shows?

One request at a time: each prompt is answered plainly, with speculation, and plainly again. What the answer with
speculation reports is compared with the time of the two plain answers over its own; the two plain ones show the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.bench import environment
from loadtest.client import Sample, closed_loop
from loadtest.daemon import running_daemon
from loadtest.workload import TASKS, Prompt, load

_PLAIN: dict[str, Any] = {"enabled": False}
_ARMS: dict[str, dict[str, Any]] = {
    "adaptive": {},
    "bv_race 4x5": {"rule": "bv_race", "num_drafts": 4, "draft_length": 5},
    "block 1x5": {"rule": "block", "num_drafts": 1, "draft_length": 5},
}


def measure(url: str, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Errors of the reported speedup by arm, and the noise."""
    model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]

    def answer(prompt: Prompt, speculation: dict[str, Any]) -> Sample:
        body = {
            "max_tokens": max_tokens,
            "temperature": 1,
            "ignore_eos": True,
            "speculation": speculation,
            "seed": None,
        }
        return asyncio.run(closed_loop(url, model, [prompt], 1, body)).samples[0]

    pairs: dict[str, list[dict[str, float]]] = {arm: [] for arm in _ARMS}
    noise: list[float] = []
    prompts = [prompt for task in TASKS for prompt in load(task)[: max(1, num_prompts // len(TASKS))]]
    for arm in _ARMS:
        answer(prompts[0], _ARMS[arm])
    for prompt in tqdm(prompts, desc="prompts", unit="prompt"):
        for arm, speculation in _ARMS.items():
            before, sample, after = answer(prompt, _PLAIN), answer(prompt, speculation), answer(prompt, _PLAIN)
            if sample.speculation is None or sample.speculation["speedup"] is None:
                raise RuntimeError("the daemon reports no speedup: start it with a draft model and with --calibrate")
            actual = (before.total_s + after.total_s) / 2 / sample.total_s
            pairs[arm].append({"reported": sample.speculation["speedup"], "actual": actual})
            noise.append(abs(before.total_s / after.total_s - 1))
    return {
        "what": "speedup reported by an answer against that of a paired plain rerun, one request at a time",
        "options": {"num_prompts": len(prompts), "max_tokens": max_tokens, "arms": _ARMS},
        "environment": environment(url),
        "noise_of_two_plain_runs": _spread(noise),
        "arms": {arm: _errors(found) | {"pairs": found} for arm, found in pairs.items()},
    }


def _errors(pairs: Sequence[dict[str, float]]) -> dict[str, Any]:
    errors = [pair["reported"] / pair["actual"] - 1 for pair in pairs]
    return {"error": statistics.median(errors), "absolute_error": _spread([abs(error) for error in errors])}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p90": statistics.quantiles(values, n=10)[-1]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a daemon on the embedded pair, or the one that is named."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.honesty", description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="daemon to measure; without it one is started on the embedded pair")
    parser.add_argument("--prompts", type=int, default=20, help="prompts, each answered three times in each arm")
    parser.add_argument("--max-tokens", type=int, default=192, help="tokens of every answer")
    parser.add_argument("--output", type=Path, help="also write the JSON document to this file")
    options = parser.parse_args(arguments)
    try:
        if options.url:
            result = measure(options.url.rstrip("/"), options.prompts, options.max_tokens)
        else:
            with running_daemon([]) as url:
                result = measure(url, options.prompts, options.max_tokens)
    except RuntimeError as error:
        print(f"honesty: {error}", file=sys.stderr)
        return 1
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    for arm, found in result["arms"].items():
        spread = found["absolute_error"]
        print(f"{arm}: error {found['error']:+.1%}, absolute {spread['median']:.1%} median, {spread['p90']:.1%} p90")
    print("noise: {median:.1%} median, {p90:.1%} p90".format(**result["noise_of_two_plain_runs"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
