"""Requests of `polydraft bench`."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from tqdm import tqdm

from loadtest import bench
from loadtest.client import RunResult
from loadtest.workload import Prompt, random_prompts


@pytest.mark.parametrize("num_prompts", [None, 3])
def test_no_answer_is_counted_twice(num_prompts: int | None) -> None:
    """Every repeat has separate prompts, or other seeds if there are too few; its arms have the same."""
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

    def noted(_: object, prompts: list[Prompt], _concurrency: int, arm: str) -> RunResult:
        if all("seed" in prompt.body for prompt in prompts):  # else a run to warm up
            asked[arm] += [(str(prompt.body["prompt"]), prompt.body["seed"]) for prompt in prompts]
        return RunResult(1.0, 8, ())

    prompts = random_prompts(16, num_prompts or options.num_prompts)
    with patch.object(bench._Bench, "run_arm", noted), patch.object(bench, "_speculation", lambda _: {}):
        bench._Bench("", "", options, 1.0).cell(prompts, 4, tqdm(disable=True))
    assert len(set(asked["off"])) == len(asked["off"]) == 3 * 8
    assert num_prompts or len({prompt for prompt, _ in asked["off"]}) == 3 * 8
    assert sorted(asked["off"]) == sorted(asked["block:1x2"])
