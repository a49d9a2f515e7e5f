"""Requests of `polydraft bench`."""

from __future__ import annotations

from typing import Any

import pytest
from tqdm import tqdm

from loadtest import bench
from loadtest.client import RunResult
from loadtest.report import versions_markdown
from loadtest.workload import Prompt, random_prompts
from tests.wrong import instead


@pytest.mark.parametrize("num_prompts", [None, 3])
def test_no_answer_is_counted_twice(num_prompts: int | None) -> None:
    """Every repeat has separate prompts, or other seeds if there are too few.

    Its arms have the same.
    """
    options = bench.BenchOptions(
        tasks=["dialogues"],
        concurrency=[1, 4],
        repeats=3,
        max_tokens=8,
        temperatures=[1.0],
        contexts=[16],
        arms=bench.arms_of(["block:1x2"], 1, 2),
    )
    asked: dict[str, list[tuple[str, int]]] = {arm: [] for arm in options.arms}

    def noted(_right: object, _: object, prompts: list[Prompt], _concurrency: int, arm: str) -> RunResult:
        if all("seed" in prompt.body for prompt in prompts):  # else a run to warm up
            asked[arm] += [(str(prompt.body["prompt"]), prompt.body["seed"]) for prompt in prompts]
        return RunResult(1.0, 8, ())

    prompts = random_prompts(16, num_prompts or options.num_prompts)
    with instead(bench._Bench, "run_arm", noted), instead(bench, "_speculation", lambda *_: {}):
        bench._Bench("", "", options, 1.0).cell(prompts, 4, tqdm(disable=True))
    assert len(set(asked["off"])) == len(asked["off"]) == 3 * 8
    assert num_prompts or len({prompt for prompt, _ in asked["off"]}) == 3 * 8
    assert sorted(asked["off"]) == sorted(asked["block:1x2"])


def test_the_version_before_is_compared_with_its_own_runs() -> None:
    """The version before is half as fast in every pair of runs, on a machine whose speed drifts."""
    arms = bench.both_versions(bench.arms_of(["adaptive", "block:1x2"], 1, 2))
    assert list(arms) == [name for arm in ("off", "adaptive", "block:1x2") for name in (arm, f"before {arm}")]
    results = {
        arm: [RunResult(1.0 + arm.startswith("before "), tokens, ()) for tokens in (100, 200, 400)] for arm in arms
    }
    with instead(bench, "_speculation", lambda *_: {}):
        found = bench.compared(results, ["block:1x2"])
    for arm in ("off", "adaptive", "block:1x2"):
        assert found["arms"][arm]["ratio_to_before"] == {"ratio": 2.0, "low": 2.0, "high": 2.0}
        assert "ratio_to_before" not in found["arms"][f"before {arm}"]
    assert found["adaptive_to_best_fixed"]["arm"] in ("off", "block:1x2")
    cell = {"task": "dialogues", "concurrency": 4, **found}
    shown = versions_markdown({"options": {}, "cells": [cell]}).splitlines()
    assert shown[3] == "| dialogues | 4 | adaptive | 100 | 200 | 2.00x (2.00-2.00) | -, - |"
    assert len(shown) == 2 + 3


def test_an_arm_of_the_version_before_runs_on_its_daemon() -> None:
    options = bench.BenchOptions(["dialogues"], [1], 1, 8, [1.0], [0], bench.both_versions(bench.arms_of([], 1, 2)))
    with instead(bench, "_model_of", lambda _, url: f"model of {url}"):
        one = bench._Bench("now", "then", options, 1.0)
        assert one._served("off") == ("now", "model of now")
        assert one._served("before off") == ("then", "model of then")


def test_another_server_is_an_arm_without_our_fields() -> None:
    """It gets OpenAI's fields and those that are named, and is no fixed shape."""
    arms = bench.arms_of(["adaptive", "block:1x2"], 1, 2) | {"llama.cpp": {}}
    addresses = {"llama.cpp": "http://other"}
    options = bench.BenchOptions(["dialogues"], [1], 1, 8, [0.0], [0], arms, (), addresses, {"cache_prompt": False})
    assert options.shapes == ["block:1x2"]
    sent: dict[str, tuple[str, dict[str, Any]]] = {}

    async def closed_loop(_: object, url: str, _model: str, *rest: Any) -> RunResult:
        sent[url] = url, rest[-1]
        return RunResult(1.0, 8, ())

    with instead(bench, "_model_of", lambda *_: "model"), instead(bench, "closed_loop", closed_loop):
        one = bench._Bench("http://own", "", options, 0.0)
        for arm in ("block:1x2", "llama.cpp"):
            one.run_arm([], 1, arm)
    fields = {"max_tokens", "temperature", "ignore_eos"}
    assert set(sent["http://other"][1]) == fields | {"cache_prompt"}
    assert set(sent["http://own"][1]) == fields | {"speculation", "cache_salt"}
