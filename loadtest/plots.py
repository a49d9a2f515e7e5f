"""Plots of a bench result.

Throughput by concurrency, tokens per pass by number of chains, gain by context.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.report import prompts_of, temperature_of, tokens_per_pass


class Point(NamedTuple):
    """Measurement with its interval; low and high are y if it has none."""

    x: float
    y: float
    low: float
    high: float


Series = dict[str, list[Point]]
"""Points of each line by name."""


def can_draw() -> bool:
    """Whether matplotlib is installed; if not, say how to install it."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    sys.stderr.write("no plots: they need matplotlib: pip install 'polydraft[bench]'\n")
    return False


@contextmanager
def drawn(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[list[Any]]:
    """Yield the axes of a figure, left to right and down, and save it as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    yield list(axes.flat)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw all panels with points as a PNG."""
    panels = panels_of(result)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with drawn(path, (5 * columns, 3.6 * rows), rows, columns) as axes:
        for axis in axes[len(panels) :]:
            axis.remove()
        for axis, panel in zip(axes, panels, strict=False):
            _draw_panel(axis, *panel)


def _draw_panel(axis: Any, title: str, across: str, up: str, series: Series) -> None:
    for name, points in series.items():
        errors = [[point.y - point.low for point in points], [point.high - point.y for point in points]]
        xs, ys = [point.x for point in points], [point.y for point in points]
        axis.errorbar(xs, ys, errors, marker="o", elinewidth=0.8, capsize=2, label=name)
    ticks = sorted({point.x for points in series.values() for point in points})
    highest = max(point.high for points in series.values() for point in points)
    axis.set(title=title, xlabel=across, ylabel=up, xscale="log", ylim=(0, 1.08 * highest))
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(fontsize="small")


def panels_of(result: dict[str, Any]) -> list[tuple[str, str, str, Series]]:
    """Return (title, x axis, y axis, lines) of every panel."""
    by_prompts: dict[str, list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        by_prompts.setdefault(prompts_of(cell, result), []).append(cell)
    panels = [
        (prompts, "requests at once", "tokens per second", throughput(result, cells))
        for prompts, cells in by_prompts.items()
        if len(cells) > 1 or len(by_prompts) == 1
    ]
    first_cells = [min(cells, key=lambda cell: int(cell["concurrency"])) for cells in by_prompts.values()]
    chains = {prompts: tokens_by_chains(result, cell) for prompts, cell in zip(by_prompts, first_cells, strict=True)}
    panels += [(prompts, "chains", "tokens per pass", series) for prompts, series in chains.items() if series]
    contexts = gain_by_context(result)
    if contexts:
        panels.append(("gain by context", "tokens of the prompt", "times plain decoding", contexts))
    return panels


def throughput(result: dict[str, Any], cells: list[dict[str, Any]]) -> Series:
    """Return tokens per second of every arm by concurrency."""
    lines: Series = {}
    for arm in result["options"]["arms"]:
        for cell in cells:
            rate = cell["arms"][arm]["tokens_per_second"]
            lines.setdefault(arm, []).append(Point(cell["concurrency"], rate, rate, rate))
    return lines


def tokens_by_chains(result: dict[str, Any], cell: dict[str, Any]) -> Series:
    """Return tokens per target pass by number of chains.

    One line per rule and length with several numbers.
    """
    lines: Series = {}
    for arm, shape in result["options"]["arms"].items():
        if "num_drafts" in shape:
            name = f"{shape['rule']}, {shape['draft_length']} tokens a chain"
            tokens = tokens_per_pass(cell["arms"][arm])
            if tokens is not None:
                lines.setdefault(name, []).append(Point(shape["num_drafts"], *tokens))
    lengths = {name.split(", ")[1] for name, points in lines.items() if len(points) > 1}
    return {name: sorted(points) for name, points in lines.items() if name.split(", ")[1] in lengths}


def gain_by_context(result: dict[str, Any]) -> Series:
    """Return the ratio to plain decoding by prompt length, for each arm and concurrency."""
    cells = [cell for cell in result["cells"] if cell.get("context")]
    if len({cell["context"] for cell in cells}) < 2:
        return {}
    lines: Series = {}
    for cell in cells:
        for arm, measured in cell["arms"].items():
            if arm != "off":
                name = f"{arm}, {cell['concurrency']} at once{temperature_of(cell, result)}"
                found = measured["ratio_to_off"]
                lines.setdefault(name, []).append(Point(cell["context"], found["ratio"], found["low"], found["high"]))
    return lines
