"""`analyze times --of chains`: steps of one request with several chains, over those with one.

Steps of K chains of four tokens, and the target's pass over 32 rows over that of one row, in turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from engine.request import Speculation
from engine.start.measuring import synthetic_plan
from engine.step.engine import Engine
from loadtest.results import document, table
from research.analysis.times.steps import PAIR_DEFAULTS, load_single, measure_turns, most_drafts, part

DEFAULTS: dict[str, Any] = {
    **{name: value for name, value in PAIR_DEFAULTS.items() if name != "dtype"},
    "dtypes": ["float32", "bfloat16"],
    "context": 256,
    "repeats": 5,
}
_LENGTH = 4
"""Tokens of a chain."""
_CHAINS = (1, 2, 4, 8)
_DRAFTED = 31
"""Drafted tokens, in one chain: with the root, 32 rows of the target's pass."""


def chains(num_drafts: int, draft_length: int) -> Speculation:
    """Return the speculation of a shape."""
    return Speculation(rule="bv_race", num_drafts=num_drafts, draft_length=draft_length)


def measure(engine: Engine, context: int, repeats: int) -> dict[str, Any]:
    """Return steps by chains and the target's pass by rows: seconds, and ratios in each turn."""
    shapes = {"off": Speculation(), "many": chains(1, _DRAFTED)}
    shapes |= {str(count): chains(count, _LENGTH) for count in _CHAINS}
    plans = {name: synthetic_plan(engine, 1, context, shape) for name, shape in shapes.items()}
    turns = measure_turns(engine, plans, repeats)
    passes = {"1": part(turns["off"], "target"), str(1 + _DRAFTED): part(turns["many"], "target")}
    return {
        "step": over_first({str(count): part(turns[str(count)], "step") for count in _CHAINS}),
        "target_pass": over_first(passes),
    }


def over_first(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return medians, and ratios to the first with their range."""
    first = next(iter(seconds.values()))
    compared = {}
    for size, runs in seconds.items():
        ratios = [run_s / first_s for run_s, first_s in zip(runs, first, strict=True)]
        compared[size] = {
            "seconds": statistics.median(runs),
            "ratio": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
        }
    return compared


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per number of chains and type."""
    rows = []
    for cell in result["cells"]:
        pass_of_many = _shown(cell["target_pass"][str(1 + _DRAFTED)])
        for size, ratio in cell["step"].items():
            rows.append([cell["dtype"], size, _shown(ratio), pass_of_many if size == "1" else ""])
    return table(["weights", "K", "step, over one chain", "target pass of 32 rows, over one"], rows)


def _shown(ratio: Mapping[str, float]) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Measure with each type of weights."""
    limits = most_drafts(max(_CHAINS), _DRAFTED)
    cells = []
    for dtype in options.dtypes:
        options.dtype = dtype
        engine = load_single(options, options.context + 2 * _DRAFTED, limits)
        cells.append({"dtype": dtype, **measure(engine, options.context, options.repeats)})
    return document(
        "steps of one request by chains of four tokens, over one chain",
        options,
        ("of", "target", "draft", "dtypes", "context", "repeats", "threads"),
        cells=cells,
    )
