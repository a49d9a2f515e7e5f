"""Rates of arms that took turns (`engine.analysis.arms`), and tables of them."""

from __future__ import annotations

from typing import Any

import numpy as np

OFF, AGAIN, ADAPTIVE = "off", "again", "adaptive"
_NUM_PARTS = 20
"""Of turns that follow each other, which the interval is of: prompts of one are decoded in the next."""
_RESAMPLES = 4000


def ratio(one: Any, other: Any) -> dict[str, float]:
    """Of two arms' tokens per second, with its 95 % interval; [turns, 2] seconds and tokens of each."""
    num_parts = min(_NUM_PARTS, len(one))
    of_one, of_other = (np.array([part.sum(0) for part in np.array_split(turns, num_parts)]) for turns in (one, other))
    drawn = np.random.default_rng(0).integers(num_parts, size=(_RESAMPLES, num_parts))
    low, high = np.quantile(rate(of_one[drawn].sum(1)) / rate(of_other[drawn].sum(1)), [0.025, 0.975])
    return {"ratio": float(rate(one.sum(0)) / rate(other.sum(0))), "low": float(low), "high": float(high)}


def rate(turns: Any) -> Any:
    """[..., 2] seconds and tokens -> [...] tokens per second."""
    return turns[..., 1] / turns[..., 0]


def markdown(result: dict[str, Any]) -> str:
    """A row per cell."""
    names = [name for name in result["cells"][0]["arms"] if name != OFF]
    head = ["prompts", "c", "off tok/s", *(f"{name} vs off (95 % interval)" for name in names)]
    lines = ["| " + " | ".join([*head, "adaptive vs the best fixed"]) + " |", "|" + " --- |" * (len(head) + 1)]
    for cell in result["cells"]:
        row = [cell["prompts"], str(cell["concurrency"]), f"{cell['arms'][OFF]['tokens_per_second']:.0f}"]
        row += [_shown(cell["arms"][name]["ratio_to_off"]) for name in names]
        best = cell.get("adaptive_to_best_fixed")
        lines.append("| " + " | ".join([*row, f"{_shown(best)} {best['arm']}" if best else "-"]) + " |")
    return "\n".join(lines)


def reported_markdown(result: dict[str, Any]) -> str:
    """What answers report beside what was measured, a row per cell."""
    names = [name for name in result["cells"][0]["arms"] if name not in (OFF, AGAIN)]
    head = ["prompts", "c", *(f"{name}: measured, reported" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in result["cells"]:
        arms = [cell["arms"][name] for name in names]
        shown = [f"{_shown(arm['ratio_to_off'])}, {arm['reported_speedup']:.2f}x" for arm in arms]
        lines.append("| " + " | ".join([cell["prompts"], str(cell["concurrency"]), *shown]) + " |")
    return "\n".join(lines)


def _shown(found: dict[str, float]) -> str:
    return f"{found['ratio']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"
