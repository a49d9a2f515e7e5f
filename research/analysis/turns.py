"""Rates of arms that took turns (`research.analysis.arms`), and tables of them.

Work is counted in tokens of plain decoding: a token of a prompt counts for the ratio of its time to
that of a decoded token. Counting only tokens of answers would make a run's rate depend on how many
prompts it happened to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadtest.arms import ADAPTIVE, AGAIN, OFF
from loadtest.plots import drawn
from loadtest.results import shown_ratio, table
from loadtest.statistics import interval

SEEDED, SEED_STABLE = "seeded", "seed_stable"
_NUM_PARTS = 20
"""Number of parts of consecutive turns for the interval, because prompts of one turn are decoded in
the next.
"""


class Turn(NamedTuple):
    """Work of an arm in a turn, or in a step."""

    seconds: float = 0.0
    num_tokens: int = 0
    """Tokens of answers."""
    num_read: int = 0
    """Tokens of prompts."""

    def plus(self, other: Turn) -> Turn:
        """Return the sum of both."""
        return Turn(self.seconds + other.seconds, self.num_tokens + other.num_tokens, self.num_read + other.num_read)

    def work(self, prompt_weight: float) -> float:
        """Return the work in tokens of plain decoding; prompt_weight: weight of a prompt token."""
        return self.num_tokens + prompt_weight * self.num_read


def price(plain: Sequence[Turn]) -> float:
    """Return the tokens that plain decoding emits in the time of one prompt token.

    By least squares over steps.

    0 if it cannot be estimated.
    """
    steps = np.array(plain, float)
    seconds, given_and_read = steps[:, 0], steps[:, 1:]
    if np.linalg.matrix_rank(given_and_read) < given_and_read.shape[1]:
        return 0.0
    given_s, read_s = np.linalg.lstsq(given_and_read, seconds, rcond=None)[0]
    return float(read_s / given_s) if min(given_s, read_s) > 0 else 0.0


def works(turns: Sequence[Turn], prompt_weight: float) -> Any:
    """Return [turns, 2] seconds and work."""
    return np.array([(turn.seconds, turn.work(prompt_weight)) for turn in turns])


def beside_best(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Compare adaptive with the fastest fixed shape (or plain decoding).

    [turns, 2] of every arm (`works`).

    The fastest shape of each half of the time is determined in the other half. This removes the
    bias of choosing the largest of several noisy rates; if several are close, another one than the
    best may be compared. `after_the_fact` compares with the largest rate.
    """
    fixed = {
        name: np.array_split(turns, 2) for name, turns in arms.items() if name not in (ADAPTIVE, AGAIN, SEED_STABLE)
    }
    second, first = (max(fixed, key=lambda name: float(rate(fixed[name][half].sum(0)))) for half in (0, 1))
    best = np.concatenate([fixed[first][0], fixed[second][1]])
    luckiest = max(float(rate(arms[name].sum(0))) for name in fixed)
    return {
        "arm": " / ".join(dict.fromkeys([first, second])),
        **ratio(arms[ADAPTIVE], best),
        "after_the_fact": float(rate(arms[ADAPTIVE].sum(0))) / luckiest,
    }


def ratio(turns: Any, other: Any) -> dict[str, float]:
    """Return the ratio of two arms' rates, with its 95 % interval; [turns, 2] of each (`works`)."""
    for num_parts in range(min(_NUM_PARTS, len(turns)), 0, -1):
        parts, other_parts = _sums(turns, num_parts), _sums(other, num_parts)
        if min(parts.min(), other_parts.min()) > 0:
            break  # a step may exceed a turn, and leave other turns without one
    spread = interval(_ratio_of_rates, *parts.T, *other_parts.T)
    return {**spread._asdict(), "ratio": float(rate(turns.sum(0)) / rate(other.sum(0)))}


def _sums(turns: Any, num_parts: int) -> Any:
    """Return [parts, 2] sums of parts of consecutive turns."""
    return np.array([part.sum(0) for part in np.array_split(turns, num_parts)])


def _ratio_of_rates(seconds: Any, work: Any, other_s: Any, other_work: Any, axis: int) -> Any:
    return work.sum(axis) / seconds.sum(axis) / (other_work.sum(axis) / other_s.sum(axis))


def rate(turns: Any) -> Any:
    """Convert [..., 2] seconds and work to [...] tokens of plain decoding per second."""
    return turns[..., 1] / turns[..., 0]


def markdown(result: dict[str, Any]) -> str:
    """Return a table with a row per cell."""
    names = [name for name in result["cells"][0]["arms"] if name != OFF]
    head = ["prompts", "c", "off tok/s", *(f"{name} vs off (95 % interval)" for name in names)]
    head += ["adaptive vs the best fixed", "adaptive reports"]
    rows = []
    for cell in result["cells"]:
        arms, best = cell["arms"], cell.get("adaptive_to_best_fixed")
        row = [cell["prompts"], str(cell["concurrency"]), f"{arms[OFF]['tokens_per_second']:.0f}"]
        row += [shown_ratio(arms[name]["ratio_to_off"]) for name in names]
        row += [f"{shown_ratio(best)} {best['arm']}", _reported(arms[ADAPTIVE])] if best else ["-", "-"]
        rows.append(row)
    return table(head, rows)


def is_shape(name: str) -> bool:
    """Whether an arm has a fixed shape (`rule:KxL`)."""
    return ":" in name


def chart(result: dict[str, Any], file: Path) -> None:
    """Draw every arm's rate over plain decoding, by cell, with intervals."""
    cells = result["cells"]
    names = [name for name in cells[0]["arms"] if name == ADAPTIVE or is_shape(name)]
    width = 0.8 / len(names)
    with drawn(file, (7, 3.2)) as (axes,):
        for number, name in enumerate(names):
            found = [cell["arms"][name]["ratio_to_off"] for cell in cells]
            places = np.arange(len(cells)) + (number - (len(names) - 1) / 2) * width
            heights = np.array([one["ratio"] for one in found])
            errors = np.array([[one["ratio"] - one["low"], one["high"] - one["ratio"]] for one in found]).T
            axes.bar(places, heights, width, yerr=errors, label=name, error_kw={"linewidth": 0.8})
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(np.arange(len(cells)), [f"{cell['prompts']}\n{cell['concurrency']} at once" for cell in cells])
        axes.set_ylabel("speed over plain decoding")
        axes.figure.legend(fontsize=8, loc="outside upper center", ncols=len(names))


def _reported(arm: dict[str, Any]) -> str:
    """Return what an arm's answers report.

    Empty if no step had an estimate of a plain step's time.
    """
    speedup = arm["reported_speedup"]
    return "-" if speedup is None else f"{speedup:.2f}x"
