"""The bench's arithmetic: intervals hold the truth, tables show what was measured."""

from __future__ import annotations

import random

import pytest

from loadtest import cli
from loadtest.bench import BenchOptions, arms_of, compared
from loadtest.client import RunResult, Sample
from loadtest.report import markdown, rules_markdown
from loadtest.statistics import median_of_ratios, ratio_of_sums
from loadtest.workload import random_prompts
from tests.wrong import instead


def test_a_paired_ratio_removes_what_both_arms_share() -> None:
    """Runs that differ tenfold from each other, arms that always differ by a half."""
    base = [1.0, 10.0, 3.0, 7.0, 2.0]
    ratio = median_of_ratios([1.5 * value for value in base], base)
    assert tuple(ratio) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_of_a_ratio_widens_with_the_noise() -> None:
    generator = random.Random(1)
    base = [10.0] * 9
    quiet = median_of_ratios([20 + generator.gauss(0, 0.1) for _ in base], base)
    noisy = median_of_ratios([20 + generator.gauss(0, 4) for _ in base], base)
    assert quiet.low < 2 < quiet.high
    assert noisy.high - noisy.low > 5 * (quiet.high - quiet.low)


def test_the_interval_of_summed_counts_covers_the_ratio_of_sums() -> None:
    generator = random.Random(2)
    steps = [generator.randint(5, 20) for _ in range(60)]
    emitted = [count * generator.uniform(2, 4) for count in steps]
    _, low, high = ratio_of_sums(emitted, steps)
    assert low < sum(emitted) / sum(steps) < high
    assert low > 2.5
    assert high < 3.5


def test_every_rule_gets_as_many_drafts_as_it_can_use() -> None:
    arms = arms_of(["block", "spechub", "bv_race"], 4, 5)
    assert {name: arm.get("num_drafts") for name, arm in arms.items()} == {
        "off": None,
        "block": 1,
        "spechub": 2,
        "bv_race": 4,
    }


def test_arms_may_say_their_shape() -> None:
    arms = arms_of(["bv_race:2x3", "block:1x3", "traversal:2.2.1", "adaptive", "again"], 4, 5)
    assert arms["bv_race:2x3"] == {"rule": "bv_race", "num_drafts": 2, "draft_length": 3}
    assert arms["block:1x3"] == {"rule": "block", "num_drafts": 1, "draft_length": 3}
    assert arms["traversal:2.2.1"] == {"rule": "traversal", "tree": [2, 2, 1]}
    assert arms["adaptive"] == {}
    assert arms["again"] == arms["off"] == {"enabled": False}


def test_adaptive_is_compared_with_the_best_fixed_shape_of_each_cell() -> None:
    def runs(*rates: float) -> list[RunResult]:
        return [RunResult(1.0, int(rate), (Sample(int(rate), 0.1, 1.0, None),)) for rate in rates]

    results = {"off": runs(50, 50), "a": runs(60, 60), "b": runs(80, 80), "again": runs(99, 99)}
    found = compared(results | {"adaptive": runs(76, 76)}, ["a", "b"])
    assert found["adaptive_to_best_fixed"]["arm"] == "b"
    assert found["adaptive_to_best_fixed"]["ratio"] == pytest.approx(0.95)
    assert found["arms"]["a"]["ratio_to_off"]["ratio"] == pytest.approx(1.2)
    assert "adaptive_to_best_fixed" not in compared(results)


def test_random_prompts_are_the_same_every_time() -> None:
    prompts = random_prompts(7, 3)
    assert [len(prompt.body["prompt"]) for prompt in prompts] == [7, 7, 7]
    assert prompts == random_prompts(7, 3)
    assert prompts != random_prompts(7, 3, seed=1)


def test_tables_name_what_the_prompts_are() -> None:
    measured = {"ratio_to_off": {"ratio": 1.5, "low": 1.4, "high": 1.6}, "tokens_per_second": 75.0}
    cell = {"task": "random", "concurrency": 2, "single_draft_acceptance": 0.7, "context": 64, "temperature": 0.0}
    cell["arms"] = {"off": measured, "block": measured}
    result = {"options": {"arms": cell["arms"], "temperatures": [0.0, 1.0]}, "cells": [cell]}
    assert "| 64 random tokens, T = 0 | 2 |" in markdown(result)


@pytest.mark.parametrize("extra", [[], ["--short"], ["--temperatures", "0.5", "--contexts", "16"]])
def test_the_command_line_measures_what_it_says(extra: list[str]) -> None:
    wanted: list[BenchOptions] = []

    def run(_: object, _url: str, options: BenchOptions) -> None:
        wanted.append(options)
        raise RuntimeError("enough")

    with instead("loadtest.bench", "run", run):
        assert cli.main(["--url", "http://localhost:1", *extra]) == 1
    (options,) = wanted
    assert options.ramp == (() if extra == ["--short"] else (1, 4, 16, 64, 16, 4, 1))
    assert 64 in options.concurrency or extra == ["--short"]
    assert list(options.temperatures) == ([0.5] if "0.5" in extra else [1.0] if extra else [0.0, 1.0])
    assert list(options.contexts) == ([16] if "16" in extra else [0] if extra else [0, 1024])


def test_tables_have_a_row_per_cell() -> None:
    ratio = {"ratio": 1.5, "low": 1.4, "high": 1.6}
    measured = {
        "ratio_to_off": ratio,
        "mean_acceptance_length": 3.25,
        "mean_acceptance_length_interval": [3.0, 3.5],
        "nodes_per_pass": 4.0,
        "tokens_per_second": 75.0,
    }
    cell = {"task": "t", "concurrency": 2, "single_draft_acceptance": 0.7}
    cell["arms"] = {"off": {"tokens_per_second": 50.0}, "block": measured}
    result = {"options": {"arms": arms_of(["block"], 4, 5)}, "cells": [cell]}
    assert markdown(result).splitlines()[-1] == "| t | 2 | 0.70 | 50 | 1.50x (1.40-1.60) | 3.25 |"
    assert rules_markdown(result).splitlines()[-1] == (
        "| t | 2 | block | 1 | 3.25 (3.00-3.50) | 4.0 | 1.50x (1.40-1.60) |"
    )
    measured |= {"tokens_per_pass": 2.5, "tokens_per_pass_interval": [2.25, 2.75]}
    assert markdown(result).splitlines()[-1].endswith(" | 2.50 |"), "of all passes, in results that have the figure"
    assert " | 2.50 (2.25-2.75) | " in rules_markdown(result)


def test_counts_are_whole_numbers_from_one_on(capsys: pytest.CaptureFixture[str]) -> None:
    options = cli.parser().parse_args(["--concurrency", "1,4,16", "--ramp", ""])
    assert (options.concurrency, options.ramp) == ([1, 4, 16], [])
    for wrong in ("0", "4,-1", "x"):
        with pytest.raises(SystemExit):
            cli.parser().parse_args(["--concurrency", wrong])
        assert "--concurrency" in capsys.readouterr().err
