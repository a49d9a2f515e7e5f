"""Measures speculation on against off on one daemon, in one run, arms interleaved.

The arms differ only in the request's own `speculation` object, so that they share the process,
the weights, the prompts and the seeds. Within a cell (task x concurrency) every repeat runs the
arms in turn, the order reversed each time (A B B A ...), on prompts of its own. Every ratio is
one of paired runs.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.client import RunResult, closed_loop, whole_text
from loadtest.statistics import paired_ratio, ratio_of_sums_interval
from loadtest.workload import Prompt, load

OFF, ADAPTIVE, AGAIN = "off", "adaptive", "again"


@dataclass(frozen=True)
class BenchOptions:
    """What is measured."""

    tasks: Sequence[str]
    concurrency: Sequence[int]
    repeats: int
    max_tokens: int
    temperature: float
    arms: dict[str, dict[str, Any]]
    """The `speculation` object of each arm; `off` is the base of all ratios."""


# Rules that verify one chain, or two.
_MAX_DRAFTS = {"token": 1, "block": 1, "greedy_block": 1, "spechub": 2}


def arms_of(rules: Sequence[str], num_drafts: int, draft_length: int) -> dict[str, dict[str, Any]]:
    """Plain decoding, and each rule with as many drafts as it can use; `adaptive` is whatever the server chooses, and
    `again` plain decoding once more, which shows the noise."""
    named = {ADAPTIVE: {}, AGAIN: {"enabled": False}}
    return {OFF: {"enabled": False}} | {
        rule: named[rule]
        if rule in named
        else {
            "rule": rule,
            "num_drafts": min(num_drafts, _MAX_DRAFTS.get(rule, num_drafts)),
            "draft_length": draft_length,
        }
        for rule in rules
    }


def run(url: str, options: BenchOptions) -> dict[str, Any]:
    """Measure all cells on the daemon at `url`; the result as one JSON document."""
    model = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    cells = []
    num_runs = len(options.tasks) * len(options.concurrency) * options.repeats * len(options.arms)
    with tqdm(total=num_runs, desc="runs", unit="run") as progress:
        exactness = asyncio.run(_greedy_equality(url, model, options))
        for task in options.tasks:
            prompts = load(task)
            acceptance = asyncio.run(_single_draft_acceptance(url, model, prompts, options))
            for concurrency in options.concurrency:
                cells.append(_cell(url, model, task, prompts, concurrency, acceptance, options, progress))
    return {
        "what": "speculation on against off, closed loop over HTTP",
        "options": asdict(options),
        "environment": environment(url),
        "exactness": exactness,
        "cells": cells,
    }


def _cell(
    url: str,
    model: str,
    task: str,
    prompts: list[Prompt],
    concurrency: int,
    acceptance: float,
    options: BenchOptions,
    progress: Any,
) -> dict[str, Any]:
    count = max(4, 2 * concurrency)
    results: dict[str, list[RunResult]] = {arm: [] for arm in options.arms}
    warm_up = _take(prompts, 0, min(count, 4))
    for arm in options.arms:
        _run_arm(url, model, warm_up, concurrency, options, arm)
    for repeat in range(options.repeats):
        chosen = _take(prompts, repeat * count, count)
        arms = list(options.arms)
        for arm in arms if repeat % 2 == 0 else arms[::-1]:
            results[arm].append(_run_arm(url, model, chosen, concurrency, options, arm))
            progress.update()
    rates = {arm: [result.tokens_per_second for result in runs] for arm, runs in results.items()}
    return {
        "task": task,
        "concurrency": concurrency,
        "single_draft_acceptance": acceptance,
        "arms": {
            arm: {
                "tokens_per_second": statistics.median(rates[arm]),
                "tokens_per_second_runs": rates[arm],
                "ratio_to_off": asdict(paired_ratio(rates[arm], rates[OFF])),
                **_speculation(results[arm]),
            }
            for arm in options.arms
        },
    }


def _take(prompts: list[Prompt], start: int, count: int) -> list[Prompt]:
    return [prompts[(start + i) % len(prompts)] for i in range(count)]


def _run_arm(
    url: str, model: str, prompts: list[Prompt], concurrency: int, options: BenchOptions, arm: str
) -> RunResult:
    body = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "ignore_eos": True,
        "speculation": options.arms[arm],
    }
    if arm == ADAPTIVE:
        body["seed"] = None  # a seed would keep the shape
    return asyncio.run(closed_loop(url, model, prompts, concurrency, body))


def _speculation(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Acceptance and reported speedup over all requests of an arm."""
    counted = [s.speculation for result in runs for s in result.samples if s.speculation is not None]
    samples = [s for result in runs for s in result.samples]
    summary: dict[str, Any] = {"first_token_s": statistics.median(s.first_token_s for s in samples)}
    if counted:
        steps = sum(part["num_spec_steps"] for part in counted)
        emitted = [part["mean_acceptance_length"] * part["num_spec_steps"] for part in counted]
        summary["mean_acceptance_length"] = sum(emitted) / steps
        interval = ratio_of_sums_interval(emitted, [part["num_spec_steps"] for part in counted])
        summary["mean_acceptance_length_interval"] = list(interval)
        summary["nodes_per_pass"] = sum(part["num_draft_tokens"] for part in counted) / steps
        reported = [part["speedup"] for part in counted if part["speedup"] is not None]
        summary["reported_speedup"] = statistics.median(reported) if reported else None
    return summary


async def _single_draft_acceptance(url: str, model: str, prompts: list[Prompt], options: BenchOptions) -> float:
    """Share of single drafted tokens that token verification accepts: sum min(p, q), measured."""
    one = {"rule": "token", "num_drafts": 1, "draft_length": 1}
    body = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "ignore_eos": True,
        "speculation": one,
    }
    result = await closed_loop(url, model, _take(prompts, 0, 16), 8, body)
    counted = [sample.speculation for sample in result.samples if sample.speculation is not None]
    return float(
        sum(part["num_accepted_draft_tokens"] for part in counted) / sum(part["num_draft_tokens"] for part in counted)
    )


async def _greedy_equality(url: str, model: str, options: BenchOptions) -> dict[str, int]:
    """How many of a few greedy answers are the same in every arm (float32 gives all of them)."""
    prompts = load(options.tasks[0])[:6]
    equal = 0
    for prompt in prompts:
        texts = {
            await whole_text(
                url, model, prompt, {"max_tokens": options.max_tokens, "temperature": 0, "speculation": arm}
            )
            for arm in options.arms.values()
        }
        equal += len(texts) == 1
    return {"greedy_answers": len(prompts), "equal_in_all_arms": equal}


def environment(url: str) -> dict[str, Any]:
    """What the numbers depend on."""
    metrics = httpx.get(f"{url}/metrics").raise_for_status().text
    build = next((line for line in metrics.splitlines() if line.startswith("polydraft_build_info")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "build": build,
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in ("torch", "transformers", "polydraft")},
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
