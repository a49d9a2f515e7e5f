"""Compares arms of speculation with plain decoding on one daemon, in one interleaved run.

Arms of the measured daemon differ only in the request's `speculation` object: they share the
process, the weights, the prompts and the seeds. Every arm may run on the daemon of another version
of the project too (`before ARM`). Each further address is an arm: a daemon with other flags, or
another server with OpenAI's API. In a cell (task x temperature x context x concurrency) every
repeat has separate prompts and runs the arms in turn, in alternating order (A B B A ...). Every
ratio compares paired runs.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx
from tqdm import tqdm

from loadtest import environment as record
from loadtest.arms import ADAPTIVE, AGAIN, OFF, parse
from loadtest.client import Refused, RunResult, closed_loop, served_model, whole_text
from loadtest.results import with_interval
from loadtest.statistics import median_of_ratios, ratio_of_sums
from loadtest.workload import Prompt, load, random_prompts


@dataclass(frozen=True)
class BenchOptions:
    """Options of a measurement."""

    tasks: Sequence[str]
    concurrency: Sequence[int]
    repeats: int
    max_tokens: int
    temperatures: Sequence[float]
    contexts: Sequence[int]
    """Number of random tokens per prompt; 0 for the prompts of the tasks."""
    arms: dict[str, dict[str, Any]]
    """`speculation` object of each arm; `off` is the base of all ratios."""
    ramp: Sequence[int] = ()
    """Concurrency of each stage of the ramp; empty for no ramp."""
    addresses: dict[str, str] = field(default_factory=dict)
    """URL of each arm that another server answers."""
    address_fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of requests to other servers."""

    @property
    def shapes(self) -> list[str]:
        """Return the arms with a fixed shape."""
        others = (OFF, ADAPTIVE, AGAIN, *self.addresses)
        return [arm for arm in self.arms if arm not in others and not arm.startswith(_BEFORE)]

    @property
    def num_prompts(self) -> int:
        """Return distinct prompts for a cell's repeats."""
        return self.repeats * _prompts_per_run(max(self.concurrency))


_model_of = functools.cache(served_model)
_BEFORE = "before "
"""Prefix of an arm that runs on the daemon of another version."""
# Rules that verify one chain or two.
_MAX_DRAFTS = {"token": 1, "block": 1, "greedy_block": 1, "spechub": 2}


def arms_of(names: Sequence[str], num_drafts: int, draft_length: int) -> dict[str, dict[str, Any]]:
    """Return plain decoding and each named arm.

    `adaptive` is the server's own choice, `again` repeats plain decoding and shows the noise. A
    rule drafts the number of chains that it can use; `rule:KxL` sets the number, `rule:2.2.1` a
    tree.
    """
    return {OFF: {"enabled": False}} | {name: _arm(name, num_drafts, draft_length) for name in names}


def _arm(name: str, num_drafts: int, draft_length: int) -> dict[str, Any]:
    if name in (ADAPTIVE, AGAIN):
        return {} if name == ADAPTIVE else {"enabled": False}
    arm = parse(name)
    if arm.tree:
        return {"rule": arm.rule, "tree": list(arm.tree)}
    num_drafts, draft_length = arm.num_drafts or num_drafts, arm.draft_length or draft_length
    num_drafts = min(num_drafts, _MAX_DRAFTS.get(arm.rule, num_drafts))
    method = {"draft_method": arm.method} if arm.method else {}
    return {"rule": arm.rule, "num_drafts": num_drafts, "draft_length": draft_length, **method}


def both_versions(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every arm followed by the same arm of the version before."""
    return {name: arm for own, arm in arms.items() for name in (own, _BEFORE + own)}


def run(url: str, options: BenchOptions, before_url: str = "") -> dict[str, Any]:
    """Measure all cells on the daemon at `url` and return the result as a JSON document.

    before_url: daemon of the version that arms `before ARM` measure.
    """
    cells = []
    kinds = [(task, 0) for task in options.tasks if 0 in options.contexts]
    kinds += [("random", context) for context in options.contexts if context]
    num_cells = len(kinds) * len(options.temperatures) * len(options.concurrency)
    first = _Bench(url, before_url, options, options.temperatures[0])
    exactness = asyncio.run(first.greedy_equality())
    with tqdm(total=num_cells * options.repeats * len(options.arms), desc="runs", unit="run") as progress:
        for task, context in kinds:
            prompts = random_prompts(context, options.num_prompts) if context else load(task)
            for temperature in options.temperatures:
                bench = _Bench(url, before_url, options, temperature)
                acceptance = asyncio.run(bench.single_draft_acceptance(prompts))
                for concurrency in options.concurrency:
                    described = {"task": task, "temperature": temperature, "context": context}
                    described["single_draft_acceptance"] = acceptance
                    cells.append(described | bench.cell(prompts, concurrency, progress))
    ramp = first.ramp(load(options.tasks[0])) if options.ramp else None
    return {
        "what": "speculation on against off, closed loop over HTTP",
        "options": asdict(options),
        "environment": environment(url),
        "addresses": {name: _model_of(address) for name, address in options.addresses.items()},
        "exactness": exactness,
        "cells": cells,
        **({"ramp": ramp} if ramp else {}),
    }


@dataclass(frozen=True)
class _Bench:
    """Runs of arms at one temperature."""

    url: str
    before_url: str
    options: BenchOptions
    temperature: float

    def cell(self, prompts: list[Prompt], concurrency: int, progress: Any) -> dict[str, Any]:
        """Measure all arms at one concurrency, interleaved."""
        options = self.options
        count = _prompts_per_run(concurrency)
        results: dict[str, list[RunResult]] = {arm: [] for arm in options.arms}
        for arm in options.arms:
            self.run_arm(_take(prompts, 0, min(count, 4)), concurrency, arm)
        for repeat in range(options.repeats):
            chosen = [
                _seeded(prompt, repeat * count + number)
                for number, prompt in enumerate(_take(prompts, repeat * count, count))
            ]
            arms = list(options.arms)
            for arm in arms if repeat % 2 == 0 else arms[::-1]:
                results[arm].append(self.run_arm(chosen, concurrency, arm))
                progress.update()
        return {"concurrency": concurrency, **compared(results, options.shapes)}

    def ramp(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Measure all arms through the stages of the ramp; the rate covers all stages."""
        options = self.options
        results: dict[str, list[RunResult]] = {arm: [] for arm in options.arms}
        num_runs = options.repeats * len(options.arms)
        for number in tqdm(range(num_runs), desc="ramp", unit="run"):
            repeat, place = divmod(number, len(options.arms))
            arm = list(options.arms)[:: 1 if repeat % 2 == 0 else -1][place]
            stages = []
            for stage, concurrency in enumerate(options.ramp):
                count = max(4, concurrency)
                stages.append(self.run_arm(_take(prompts, (repeat + stage) * count, count), concurrency, arm))
            samples = tuple(sample for stage_result in stages for sample in stage_result.samples)
            # Each stage counts with its requested tokens, which are the same in every arm, at its
            # measured rate.
            counts = [sum(sample.num_tokens for sample in one.samples) for one in stages]
            busy_s = sum(count / one.tokens_per_second for count, one in zip(counts, stages, strict=True))
            results[arm].append(RunResult(busy_s, sum(counts), samples))
        return {"stages": list(options.ramp), **compared(results, options.shapes)}

    def run_arm(self, prompts: list[Prompt], concurrency: int, arm: str) -> RunResult:
        """Run one closed loop without cached prefixes of other runs."""
        if arm in self.options.addresses:
            body = self._plain_body() | self.options.address_fields
        else:
            body = {**self._body(self.options.arms[arm]), "cache_salt": uuid.uuid4().hex}
        if arm.removeprefix(_BEFORE) == ADAPTIVE:
            body["seed"] = None  # a seed would fix the shape
        return asyncio.run(closed_loop(*self._served(arm), prompts, concurrency, body))

    async def single_draft_acceptance(self, prompts: list[Prompt]) -> float | None:
        """Measure the share of single drafted tokens that are accepted: sum min(p, q).

        None without a draft model.
        """
        body = self._body({"rule": "token", "num_drafts": 1, "draft_length": 1})
        try:
            result = await closed_loop(*self._served(OFF), _take(prompts, 0, 16), 8, body)
        except Refused:
            return None
        counted = [sample.speculation for sample in result.samples if sample.speculation is not None]
        accepted = sum(part["num_accepted_draft_tokens"] for part in counted)
        return float(accepted / sum(part["num_draft_tokens"] for part in counted))

    async def greedy_equality(self) -> dict[str, int]:
        """Count greedy answers that are the same in every arm (in float32 all are)."""
        options = self.options
        prompts = load(options.tasks[0])[:6] if 0 in options.contexts else random_prompts(options.contexts[0], 6)
        body = {"max_tokens": options.max_tokens, "temperature": 0}
        equal = 0
        for prompt in prompts:
            texts = {
                await whole_text(*self._served(arm), prompt, {**body, "speculation": speculation})
                for arm, speculation in options.arms.items()
                if arm not in options.addresses
            }
            equal += len(texts) == 1
        return {"greedy_answers": len(prompts), "equal_in_all_arms": equal}

    def _served(self, arm: str) -> tuple[str, str]:
        """Return the URL and the model's name of the daemon that an arm measures."""
        url = self.before_url if arm.startswith(_BEFORE) else self.options.addresses.get(arm, self.url)
        return url, _model_of(url)

    def _plain_body(self) -> dict[str, Any]:
        return {"max_tokens": self.options.max_tokens, "temperature": self.temperature, "ignore_eos": True}

    def _body(self, speculation: dict[str, Any]) -> dict[str, Any]:
        return {**self._plain_body(), "speculation": speculation}


def compared(results: dict[str, list[RunResult]], shapes: Sequence[str] = ()) -> dict[str, Any]:
    """Return every arm's rate relative to plain decoding in the same repeat.

    Also to the version before, and adaptive's to the best fixed shape.

    shapes: arms with a fixed shape.
    """
    rates = {arm: [result.tokens_per_second for result in runs] for arm, runs in results.items()}
    compared: dict[str, Any] = {
        "arms": {
            arm: {
                "tokens_per_second": statistics.median(rates[arm]),
                "tokens_per_second_runs": rates[arm],
                "ratio_to_off": median_of_ratios(rates[arm], rates[OFF])._asdict(),
                **_speculation(results[arm]),
            }
            for arm in results
        }
    }
    for arm, found in compared["arms"].items():
        if (before := _BEFORE + arm) in rates:
            found["ratio_to_before"] = median_of_ratios(rates[arm], rates[before])._asdict()
    fixed = [arm for arm in results if arm == OFF or arm in shapes]
    if ADAPTIVE in results and len(fixed) > 1:
        best = max(fixed, key=lambda arm: statistics.median(rates[arm]))
        compared["adaptive_to_best_fixed"] = {"arm": best, **median_of_ratios(rates[ADAPTIVE], rates[best])._asdict()}
    return compared


def _prompts_per_run(concurrency: int) -> int:
    return max(4, 2 * concurrency)


def _seeded(prompt: Prompt, seed: int) -> Prompt:
    """Return the prompt with a seed that is the same in every arm.

    Repeated prompts get different answers.
    """
    return replace(prompt, body=prompt.body | {"seed": seed})


def _take(prompts: list[Prompt], start: int, count: int) -> list[Prompt]:
    return [prompts[(start + i) % len(prompts)] for i in range(count)]


def _speculation(runs: Sequence[RunResult]) -> dict[str, Any]:
    """Return acceptance and reported speedup over all requests of an arm."""
    counted = [s.speculation for result in runs for s in result.samples if s.speculation is not None]
    samples = [s for result in runs for s in result.samples]
    summary: dict[str, Any] = {"first_token_s": statistics.median(s.first_token_s for s in samples)}
    if counted:
        steps = sum(part["num_spec_steps"] for part in counted)
        emitted = [round(part["mean_acceptance_length"] * part["num_spec_steps"]) for part in counted]
        per_step = ratio_of_sums(emitted, [part["num_spec_steps"] for part in counted])
        summary |= with_interval("mean_acceptance_length", per_step)
        summary["nodes_per_pass"] = sum(part["num_draft_tokens"] for part in counted) / steps
        if all("num_passes" in part for part in counted):  # an earlier version has no such field
            num_tokens = [round(part["tokens_per_pass"] * part["num_passes"]) for part in counted]
            per_pass = ratio_of_sums(num_tokens, [part["num_passes"] for part in counted])
            summary |= with_interval("tokens_per_pass", per_pass)
        reported = [part["speedup"] for part in counted if part["speedup"] is not None]
        summary["reported_speedup"] = statistics.median(reported) if reported else None
    return summary


def environment(url: str) -> dict[str, Any]:
    """Return the environment of the measurement and the daemon's facts."""
    metrics = httpx.get(f"{url}/metrics").raise_for_status().text
    build = next((line for line in metrics.splitlines() if line.startswith("polydraft_build_info")), "")
    return {"build": build, **record.environment()}
