"""Beyond the papers: the score race and the weighted race against all other rules, at twelve drafted tokens a pass.

On the pair that is analysed, and on a second one of another size with known laws (`engine.demo.bench_pair`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.analysis.pair import Shape, answers_of
from engine.analysis.papers.cases import Pair, Progress
from loadtest.statistics import ratio_of_sums

TEMPERATURES = (0.6, 1.0)
SHAPES = (
    "block:1x12", "bv_race:2x6", "bv_race:3x4", "bv_race:4x3", "weighted_race:3x4", "weighted_race:4x3", "kseq:3x4",
    "rrs:3x4", "spectr_gbv:3x4", "traversal/iid:3x4", "traversal/without_replacement:3x4",
    "rrs_without_replacement/without_replacement:3x4", "greedy/greedy:3x4", "spechub/spechub:2x6",
)  # fmt: skip
"""Twelve drafted tokens each; equal ones below the same parent are one node."""
TIMES = 4
"""Of a task's prompts."""
SECOND_PAIR = ("draft", "tiny", 4096, 0.65, 512)
"""Sizes of target and draft, vocabulary, acceptance of a single draft, longest text."""


def random_prompts(count: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Prompts of a pair that has no language."""
    random = np.random.default_rng(0)
    return [tuple(random.integers(0, vocabulary, 8).tolist()) for _ in range(count)]


def measure(pair: Pair, prompts: Sequence[tuple[int, ...]], progress: Progress) -> list[dict[str, Any]]:
    """Tokens per pass of every shape, with the interval over answers."""
    rows = []
    for temperature in TEMPERATURES:
        for text in SHAPES:
            shape = Shape.parse(text)
            answers = answers_of(pair.engine, list(prompts), shape.speculation, temperature, pair.tokens)
            answers = [answer for answer in answers if answer.tokens]
            steps = [answer.num_steps for answer in answers]
            found = ratio_of_sums([len(answer.tokens) for answer in answers], steps)
            nodes = sum(answer.num_nodes for answer in answers) / sum(steps)
            row = {"pair": pair.name, "temperature": temperature, "rule": shape.rule, "drafts": shape.method}
            rows.append(
                row
                | {"size": shape.size, "nodes": nodes}
                | {"tokens_per_pass": found.ratio, "low": found.low, "high": found.high}
            )
            progress(f"{pair.name}, T = {temperature}, {shape.key}")
    return rows
