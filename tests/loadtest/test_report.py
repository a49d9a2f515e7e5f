"""The bench's arithmetic: intervals hold the truth, tables show what was measured."""

from __future__ import annotations

import random

import pytest

from loadtest.bench import arms_of
from loadtest.report import markdown, rules_markdown
from loadtest.statistics import paired_ratio, ratio_of_sums_interval


def test_a_paired_ratio_removes_what_both_arms_share() -> None:
    """Runs that differ tenfold from each other, arms that always differ by a half."""
    base = [1.0, 10.0, 3.0, 7.0, 2.0]
    ratio = paired_ratio([1.5 * value for value in base], base)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_of_a_ratio_widens_with_the_noise() -> None:
    generator = random.Random(1)
    base = [10.0] * 9
    quiet = paired_ratio([20 + generator.gauss(0, 0.1) for _ in base], base)
    noisy = paired_ratio([20 + generator.gauss(0, 4) for _ in base], base)
    assert quiet.low < 2 < quiet.high
    assert noisy.high - noisy.low > 5 * (quiet.high - quiet.low)


def test_the_interval_of_summed_counts_covers_the_ratio_of_sums() -> None:
    generator = random.Random(2)
    steps = [generator.randint(5, 20) for _ in range(60)]
    emitted = [count * generator.uniform(2, 4) for count in steps]
    low, high = ratio_of_sums_interval(emitted, steps)
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


def test_tables_have_a_row_per_cell() -> None:
    ratio = {"median": 1.5, "low": 1.4, "high": 1.6}
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
