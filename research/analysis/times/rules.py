"""`analyze times --of rules`: verification by every rule, in steps of one request that take turns.

Rules that the pair cannot be served with are left out. Fewer chains are drawn for rules that take
no more.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from engine.request import Speculation
from engine.speculation.conditions import served_rules
from engine.speculation.verification import RULES
from engine.start.measuring import synthetic_plan
from loadtest.results import document, table
from research.analysis.times.steps import PAIR_DEFAULTS, load_single, measure_turns, most_drafts, part

DEFAULTS: dict[str, Any] = {
    **PAIR_DEFAULTS,
    "num_drafts": [1, 4],
    "draft_length": 5,
    "context": 256,
    "repeats": 5,
}


def analyze(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians by rule and number of chains."""
    limits = most_drafts(max(options.num_drafts), options.draft_length)
    engine = load_single(options, 2 * options.context, limits)
    plans = {}
    for name in served_rules(engine.facts):
        for wanted in options.num_drafts:
            count = min(wanted, RULES[name].max_drafts or wanted)
            shape = Speculation(rule=name, num_drafts=count, draft_length=options.draft_length)
            plans[f"{name} {count}"] = synthetic_plan(engine, 1, options.context, shape)
    cells = []
    for name, turns in measure_turns(engine, plans, options.repeats).items():
        rule_name, count_text = name.split()
        medians = {f"{phase}_ms": 1000 * statistics.median(part(turns, phase)) for phase in turns[0]}
        cells.append({"rule": rule_name, "num_drafts": int(count_text), **medians})
    names = ("of", "draft_length", "context", "dtype", "threads", "repeats")
    what = "medians: milliseconds of steps of one request, and of their parts, by rule and chains"
    return document(what, options, names, cells=cells)


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per rule and number of chains."""
    rows = []
    for cell in result["cells"]:
        times = [f"{cell[name]:.2f}" for name in ("draft_ms", "verify_ms", "step_ms")]
        rows.append([cell["rule"], cell["num_drafts"], *times])
    return table(["rule", "drafts", "drafting, ms", "verification, ms", "step, ms"], rows)
