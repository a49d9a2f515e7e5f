"""Plots of the papers' tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.plots import can_draw, drawn
from research.analysis.papers.blocks import NAMES


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write a PNG for each measured section; none without matplotlib."""
    if not can_draw():
        return []
    painters: dict[str, Callable[[Sequence[Any], Any], None]] = {
        "optimal": _optimal,
        "blocks": _blocks,
        "theoretical": _theoretical,
        "races": _races,
    }
    files = []
    for name, paint in painters.items():
        if name not in results:
            continue
        files.append(folder / f"papers-{name}.png")
        with drawn(files[-1], (11, 4.2), columns=2) as axes:
            paint(axes, results[name])
    return files


def _optimal(axes: Sequence[Any], result: dict[str, Any]) -> None:
    left, right = axes
    rows = [row for row in result["rows"] if row["drafts"] == 3]
    for method in ("iid", "without_replacement", "greedy"):
        points = [(row["temperature"], row["alpha_star"][method]) for row in rows]
        left.plot(*zip(*points, strict=True), marker="o", label=method.replace("_", " "))
    left.set(xlabel="temperature", ylabel="alpha*", title="the optimum, three drafts")
    for rule in rows[0]["acceptance"]:
        method = rule.partition("/")[2]
        points = [(row["temperature"], 100 * (row["alpha_star"][method] - row["acceptance"][rule])) for row in rows]
        if not rule.startswith("nss"):
            right.plot(*zip(*points, strict=True), marker=".", label=rule)
    right.set(xlabel="temperature", ylabel="points below the optimum", title="the gap of every rule, three drafts")
    for axis in axes:
        axis.legend(fontsize=7)


def _blocks(axes: Sequence[Any], result: dict[str, Any]) -> None:
    for axis, temperature in zip(axes, dict.fromkeys(row["temperature"] for row in result["pooled"]), strict=False):
        rows = [row for row in result["pooled"] if row["temperature"] == temperature and row["length"] == 8]
        single = {row["rule"]: row["block_efficiency"] for row in rows if row["chains"] == 1}
        start = {"kseq": "token", "spectr_gbv": "greedy_block", "bv_race": "block", "traversal": "block"}
        for rule, first in start.items():
            points = [(1, single[first])]
            points += [(row["chains"], row["block_efficiency"]) for row in rows if row["rule"] == rule]
            axis.plot(*zip(*points, strict=True), marker="o", label=NAMES[rule])
        axis.set(xlabel="chains", ylabel="block efficiency", title=f"all tasks, T = {temperature:g}, 8 tokens a chain")
        axis.legend(fontsize=7)


def _theoretical(axes: Sequence[Any], result: dict[str, Any]) -> None:
    left, right = axes
    rows = result["batches"]
    left.plot([row["batch"] for row in rows], [row["predicted"] for row in rows], "k--", label="Theorem 3")
    errors = [[row["simulated"] - row["low"] for row in rows], [row["high"] - row["simulated"] for row in rows]]
    left.errorbar(
        [row["batch"] for row in rows], [row["simulated"] for row in rows], errors, fmt="o", label="simulated"
    )
    left.set(xscale="log", xlabel="drafts at a restart", ylabel="rejections", title="a Markov chain of 50 tokens")
    for name, label in (("opt", "Decoding-OPT"), ("uno", "Decoding-UNO")):
        points = [(row["rejection"], row[name]) for row in result["front"]]
        right.plot(*zip(*points, strict=True), marker="o", label=label)
    points = [(row["rejection"], row["line"]) for row in result["front"]]
    right.plot(*zip(*points, strict=True), "k--", label="Theorem 5")
    right.set(xlabel="rejection probability", ylabel="distance from the target", title="what acceptance costs")
    for axis in axes:
        axis.legend(fontsize=7)


def _races(axes: Sequence[Any], result: dict[str, list[dict[str, Any]]]) -> None:
    runs = result["runs"]
    for axis, pair in zip(axes, dict.fromkeys(row["pair"] for row in runs), strict=True):
        rows = [row for row in runs if row["pair"] == pair and row["temperature"] == 1.0]
        rows.sort(key=lambda row: row["tokens_per_pass"])
        names = [f"{row['rule']} {row['size']}" for row in rows]
        values = [row["tokens_per_pass"] for row in rows]
        errors = [[v - row["low"] for v, row in zip(values, rows, strict=True)]]
        errors.append([row["high"] - v for v, row in zip(values, rows, strict=True)])
        axis.barh(names, values, xerr=errors, color="tab:blue", alpha=0.7)
        axis.set(xlabel="tokens per pass", title=f"{pair}, T = 1, twelve drafted tokens", xlim=(1, None))
        axis.tick_params(axis="y", labelsize=7)
