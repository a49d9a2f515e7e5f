"""Table, recommendation and plots of `analyze pair`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.speculation.verification import RULES
from loadtest import results
from loadtest.plots import can_draw, drawn


def number(value: float | None, digits: int = 3) -> str:
    """Return a number, or a dash for one that would take too long."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(report: Sequence[dict[str, Any]], concurrency: Sequence[int]) -> str:
    """Return a Markdown table with a row per temperature, rule and shape."""
    titles = ["T", "rule", "drafts", "shape", "alpha*", "acceptance", "gap", "tokens/pass (95 %)", "closed form"]
    titles += ["nodes", *(f"c = {count}" for count in concurrency)]
    rows = []
    for cell in report:
        passes = f"{cell['tokens_per_pass']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"
        row = [
            f"{cell['temperature']:g}",
            cell["rule"],
            cell["draft_method"],
            cell["size"],
            number(cell["alpha_star"]),
            number(cell["acceptance"]),
            number(cell["gap"]),
            passes,
            number(cell["expected_tokens_per_pass"], 2),
            number(cell["nodes_per_pass"], 1),
            *(f"{cell['speedup'][str(count)]:.2f}x" for count in concurrency),
        ]
        rows.append(row)
    return results.table(titles, rows)


def recommend(report: Sequence[dict[str, Any]], concurrency: Sequence[int]) -> list[str]:
    """Return flags for each number of requests.

    Of the shape that is best over the temperatures, or none.
    """
    shapes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in report:
        shape = tuple(cell[name] for name in ("rule", "draft_method", "size"))
        shapes.setdefault(shape, []).append(cell)
    lines = []
    for count in concurrency:
        means = {s: float(np.mean([cell["speedup"][str(count)] for cell in cells])) for s, cells in shapes.items()}
        best = max(means, key=lambda shape: means[shape])
        rule, method, size = best
        if means[best] <= 1:
            lines.append(f"c = {count}: --spec-rule off (the best, {rule}, would give {means[best]:.2f}x)")
            continue
        drawn = "" if method == RULES[rule].draft_methods[0] else f" --draft-method {method}"
        chains, _, length = size.partition("x")
        drafts = (
            f"--num-drafts {chains} --draft-length {length}" if length else f"--draft-tree {size.replace('.', ',')}"
        )
        flags = f"--spec-rule {rule} {drafts}{drawn}"
        lines.append(f"c = {count}: {flags} (expected {means[best]:.2f}x)")
    return lines


def print_report(report: Sequence[dict[str, Any]], content: dict[str, Any], concurrency: Sequence[int]) -> None:
    """Print the report on standard error (standard output has the JSON)."""
    write = sys.stderr.write
    write("\n" + table(report, concurrency) + "\n\n")
    for temperature, laws in content["laws"].items():
        write(
            f"T = {temperature}: single-draft acceptance {1 - laws['rejections_per_token']:.3f}, "
            f"{laws['rejections_per_token']:.3f} rejections a token, over {laws['positions']} positions\n"
        )
        for epsilon, point in laws["over_acceptance"].items():
            write(
                f"  over-acceptance {epsilon}: rejection {point['rejection']:.3f}, bias {point['bias']:.3f} a token\n"
            )
    write("\nrecommended\n  " + "\n  ".join(recommend(report, concurrency)) + "\n")


def save_plots(report: Sequence[dict[str, Any]], content: dict[str, Any], folder: Path) -> list[Path]:
    """Draw acceptance by drafts, tokens per pass by drafts, and expected speedup by requests.

    Return the PNG files.
    """
    if not can_draw():
        return []
    temperature = report[0]["temperature"]
    cells = [cell for cell in report if cell["temperature"] == temperature]
    length = max(cell["draft_length"] for cell in cells)
    files = []
    for name, label in (("acceptance", "acceptance at one position"), ("tokens_per_pass", "tokens per target pass")):
        files.append(folder / f"{name}.png")
        with drawn(files[-1], (7, 4.5)) as (axes,):
            for rule in dict.fromkeys(cell["rule"] for cell in cells):
                same_rule = [cell for cell in cells if cell["rule"] == rule and cell["draft_length"] == length]
                points = sorted((cell["num_drafts"], cell[name]) for cell in same_rule)
                axes.plot(*zip(*points, strict=True), marker="o", label=rule)
            if name == "acceptance":
                optima = content["laws"][str(temperature)]["alpha_star"].items()
                points = sorted((int(key.split("/")[1]), best) for key, best in optima if key.startswith("iid/"))
                axes.plot(*zip(*points, strict=True), "k--", label="alpha* (i.i.d.)")
            axes.set(xlabel="drafts (K)", ylabel=label, title=f"T = {temperature:g}, draft length {length}")
            axes.legend(fontsize=7)
    files.append(folder / "speedup.png")
    with drawn(files[-1], (7, 4.5)) as (axes,):
        for cell in cells:
            points = sorted((int(count), value) for count, value in cell["speedup"].items())
            axes.plot(*zip(*points, strict=True), marker=".", label=f"{cell['rule']} {cell['size']}")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="requests at once", ylabel="expected speedup", title=f"T = {temperature:g}")
        axes.legend(fontsize=6, ncols=2)
    return files
