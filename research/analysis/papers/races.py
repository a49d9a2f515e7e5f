"""Beyond the papers: the score race and the weighted race.

They are compared with all other rules, at twelve drafted tokens per pass.

Measured with the engine on the analysed pair and on a second one of another size with known
distributions (`bench_pair`), and in closed form on distributions recorded along the target's texts,
without draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.statistics import ratio_of_sums
from research.analysis.load import SpeculationSetup
from research.analysis.pair import answers_of, laws_along, log_probs, measure_position
from research.analysis.papers.cases import Progress, ServedPair, recorded_distributions, texts_of
from research.analysis.papers.grid import RacesGrid
from tests.oracles.bounds import expected_block_length

TOKEN_SHAPES = ("nss:12x1", "rrs:12x1", "kseq:12x1", "bv_race:12x1", "weighted_race:12x1")
LONGEST = 12
"""Tokens of the longest chain in `TOKEN_SHAPES`. All shapes are evaluated at positions that this
many tokens follow.
"""
TIMES = 3
"""Repetitions of a task's prompts."""


def random_prompts(count: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Return random prompts for a pair without a language."""
    random = np.random.default_rng(0)
    return [tuple(random.integers(0, vocabulary, 8).tolist()) for _ in range(count)]


def measure(
    pair: ServedPair, grid: RacesGrid, prompts: Sequence[tuple[int, ...]], progress: Progress
) -> list[dict[str, Any]]:
    """Return tokens per pass of every shape, with the interval over answers."""
    rows = []
    for temperature in grid.temperatures:
        for text in grid.shapes:
            shape = SpeculationSetup.parse(text)
            answers = answers_of(pair.engine, prompts, shape.speculation, temperature, pair.tokens)
            answers = [answer for answer in answers if answer.tokens]
            steps = [len(answer.steps) for answer in answers]
            found = ratio_of_sums([len(answer.tokens) for answer in answers], steps)
            nodes = sum(step.num_nodes for answer in answers for _, step in answer.steps) / sum(steps)
            row = {"pair": pair.name, "temperature": temperature, "rule": shape.rule, "drafts": shape.method}
            rows.append(
                row
                | {"size": shape.size, "nodes": nodes}
                | {"tokens_per_pass": found.ratio, "low": found.low, "high": found.high}
            )
            progress(f"{pair.name}, T = {temperature}, {shape.key}")
    return rows


def recorded(
    pair: ServedPair, grid: RacesGrid, prompts: Sequence[tuple[int, ...]], positions: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return expected tokens per pass on the distributions along the target's texts.

    Intervals over texts or positions.
    """
    rows = []
    for temperature in grid.temperatures:
        texts = texts_of(pair, prompts, temperature)
        chances = [
            np.stack([log_probs(rows, tokens) for rows in laws_along(pair.engine, prompt, tokens, temperature)])
            for prompt, tokens in texts
        ]
        for shape_text, verification in grid.block_shapes:
            shape = SpeculationSetup.parse(shape_text)
            lengths = []
            for text in chances:
                if text.shape[1] >= LONGEST:
                    windows = np.lib.stride_tricks.sliding_window_view(text, LONGEST, axis=1)
                    log_p, log_q = windows[..., : shape.draft_length]
                    lengths.append(expected_block_length(log_p, log_q, shape.num_drafts, verification))
            if lengths:
                rows.append(_row(shape, temperature, [(float(one.sum()), len(one)) for one in lengths]))
        accepted: dict[str, list[float]] = {}
        shapes = [SpeculationSetup.parse(text) for text in TOKEN_SHAPES]
        for number, (p, q) in enumerate(recorded_distributions(pair, texts, temperature, positions)):
            measure_position(p, q, number, shapes, {}, accepted)
        for shape in shapes:
            found = accepted[f"{shape.rule}/{shape.method}/{shape.num_drafts}"]
            rows.append(_row(shape, temperature, [(value, 1) for value in found]))
        progress(f"recorded laws, T = {temperature}")
    return rows


def _row(shape: SpeculationSetup, temperature: float, lengths: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Return a row of the table.

    lengths: (sum of expected accepted tokens, passes) of each text or position.
    """
    found = ratio_of_sums([kept + passes for kept, passes in lengths], [passes for _, passes in lengths])
    row = {"temperature": temperature, "rule": shape.rule, "size": shape.size}
    return row | {"tokens_per_pass": found.ratio, "low": found.low, "high": found.high}
