"""*SpecTr-GBV* (Lin et al., 2026): block efficiency of rules by chains and length.

On five task sets.

Measured with the serving engine. Block efficiency is tokens per pass of the target. The expected
speedup at one request is block efficiency x a plain step's time / the step's time; steps of all
shapes take turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.request import Speculation
from engine.start.distribution_check import check_distribution, make_prompt
from engine.start.measuring import middle_steps, synthetic_plan
from loadtest.statistics import ratio_of_sums
from research.analysis.load import SpeculationSetup
from research.analysis.pair import answers_of
from research.analysis.papers import lengths
from research.analysis.papers.cases import Progress, ServedPair
from research.analysis.papers.grid import ONE_CHAIN, SEVERAL, BlocksGrid

NAMES = {
    "token": "SD (token)",
    "kseq": "SpecTr (K-SEQ)",
    "greedy_block": "GBV",
    "spectr_gbv": "SpecTr-GBV, exact",
    "block": "BV",
    "bv_race": "score race",
    "traversal": "traversal",
}
_CONTEXT = 128


def measure(pair: ServedPair, grid: BlocksGrid, progress: Progress) -> dict[str, Any]:
    """Return a cell per task, temperature and shape.

    The pooled ones; times; and a test of each rule's output distribution.
    """
    wanted = grid.shapes()
    cells = []
    for task in grid.tasks:
        prompts = pair.prompts(task)
        for temperature in grid.temperatures:
            for shape in wanted:
                answers = answers_of(pair.engine, prompts, shape.speculation, temperature, pair.tokens)
                answers = [answer for answer in answers if answer.tokens]
                cells.append(
                    {
                        "task": task,
                        "temperature": temperature,
                        "rule": shape.rule,
                        "chains": shape.num_drafts,
                        "length": shape.draft_length,
                        "tokens": [len(answer.tokens) for answer in answers],
                        "steps": [len(answer.steps) for answer in answers],
                    }
                )
                progress(f"{task}, T = {temperature}, {shape.key}")
    times = _times(pair, wanted, progress)
    return {
        "cells": cells,
        "pooled": pooled(cells, times),
        "times": times,
        "closed_forms": lengths.compare(pair, pair.dialogues(lengths.TIMES), grid.compared_length, progress),
        "laws": _laws(pair, grid.checked, progress),
    }


def _times(pair: ServedPair, wanted: Sequence[SpeculationSetup], progress: Progress) -> dict[str, dict[str, float]]:
    """Return seconds of a step at one request, and the share of it for verification."""
    plans = [synthetic_plan(pair.engine, 1, _CONTEXT, shape.speculation) for shape in wanted]
    found = middle_steps(pair.engine, [synthetic_plan(pair.engine, 1, _CONTEXT, Speculation()), *plans])
    progress("times")
    keys = ["plain", *(shape.key for shape in wanted)]
    return {
        key: {"step_s": step_s, "verify_share": phases.get("verify", 0.0) / step_s}
        for key, (step_s, phases) in zip(keys, found, strict=True)
    }


def pooled(cells: Sequence[dict[str, Any]], times: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return all tasks together.

    Block efficiency with its interval over answers, expected speedup, share of verification.
    """
    groups: dict[tuple[float, str, int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for cell in cells:
        tokens, steps = groups[cell["temperature"], cell["rule"], cell["chains"], cell["length"]]
        tokens += cell["tokens"]
        steps += cell["steps"]
    rows = []
    for (temperature, rule, chains, length), (tokens, steps) in groups.items():
        found = ratio_of_sums(tokens, steps)
        time = times[f"{rule}/iid/{chains}x{length}"]
        rows.append(
            {
                "temperature": temperature,
                "rule": rule,
                "chains": chains,
                "length": length,
                "block_efficiency": found.ratio,
                "low": found.low,
                "high": found.high,
                "speedup": found.ratio * times["plain"]["step_s"] / time["step_s"],
                "verify_share": time["verify_share"],
            }
        )
    return rows


def _laws(pair: ServedPair, num_answers: int, progress: Progress) -> list[dict[str, Any]]:
    """Compare each rule's output distribution with the target's.

    By a test with answers of two steps and more.
    """
    prompt = make_prompt(pair.engine, 1)
    checks = []
    for rule in (*ONE_CHAIN, *SEVERAL):
        shape = SpeculationSetup(rule, "iid", 1 if rule in ONE_CHAIN else 4, 3)
        check = check_distribution(pair.engine, rule, shape.speculation, prompt, num_answers, 1.0)
        checks.append({"rule": rule, "p_value": check.p_value, "answers": check.num_answers, "cells": check.num_cells})
        progress(f"law of {rule}")
    return checks


def falls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cells whose block efficiency falls with more chains.

    By more than its intervals allow.
    """
    found = []
    for row in rows:
        more = [
            other
            for other in rows
            if all(other[name] == row[name] for name in ("temperature", "rule", "length"))
            and other["chains"] > row["chains"]
            and other["high"] < row["low"]
        ]
        found += [f"{row['rule']} {row['chains']} to {other['chains']} x{row['length']}" for other in more]
    return found


def by_task(
    cells: Sequence[dict[str, Any]], rule: str, chains: int, length: int, temperature: float
) -> dict[str, float]:
    """Return block efficiency of one shape on every task."""
    return {
        cell["task"]: float(np.sum(cell["tokens"]) / np.sum(cell["steps"]))
        for cell in cells
        if (cell["rule"], cell["chains"], cell["length"], cell["temperature"]) == (rule, chains, length, temperature)
    }
