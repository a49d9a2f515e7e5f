"""Rates of arms that took turns (`analysis.arms`), and tables of them.

What an arm has done is counted in tokens of plain decoding: one of a prompt, which it reads, counts for what it takes
beside one that it gives. By tokens of answers alone it would be chance how many prompts a run has still read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadtest.arms import ADAPTIVE, AGAIN, OFF
from loadtest.statistics import interval

SEEDED, SEED_STABLE = "seeded", "seed_stable"
_NUM_PARTS = 20
"""Of turns that follow each other, which the interval is of: prompts of one are decoded in the next."""


class Turn(NamedTuple):
    """What an arm did in a turn, or in a step."""

    seconds: float = 0.0
    num_tokens: int = 0
    """Of answers."""
    num_read: int = 0
    """Of prompts."""

    def plus(self, other: Turn) -> Turn:
        """Both together."""
        return Turn(self.seconds + other.seconds, self.num_tokens + other.num_tokens, self.num_read + other.num_read)

    def work(self, of_read: float) -> float:
        """In tokens of plain decoding; of_read: what one of a prompt is."""
        return self.num_tokens + of_read * self.num_read


def price(plain: Sequence[Turn]) -> float:
    """How many tokens plain decoding gives in the time in which it reads one of a prompt: by least squares over steps.

    0 where that is not to be seen.
    """
    steps = np.array(plain, float)
    seconds, given_and_read = steps[:, 0], steps[:, 1:]
    if np.linalg.matrix_rank(given_and_read) < given_and_read.shape[1]:
        return 0.0
    given_s, read_s = np.linalg.lstsq(given_and_read, seconds, rcond=None)[0]
    return float(read_s / given_s) if min(given_s, read_s) > 0 else 0.0


def works(turns: Sequence[Turn], of_read: float) -> Any:
    """[turns, 2] seconds, and what was done."""
    return np.array([(turn.seconds, turn.work(of_read)) for turn in turns])


def beside_best(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Adaptive beside the fixed shape (or plain decoding) that is the fastest; [turns, 2] of every arm (`works`).

    Which is the fastest in a half of the time is found in the other: the luck of the greatest of several is not in it,
    but where several are close another than the best may be compared. `after_the_fact` is beside the luckiest.
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


def ratio(one: Any, other: Any) -> dict[str, float]:
    """Of two arms' rates, with its 95 % interval; [turns, 2] of each (`works`)."""
    for num_parts in range(min(_NUM_PARTS, len(one)), 0, -1):
        of_one, of_other = (
            np.array([part.sum(0) for part in np.array_split(turns, num_parts)]) for turns in (one, other)
        )
        if min(of_one.min(), of_other.min()) > 0:
            break  # a step may do more than a turn holds, and leave others without one
    found = interval(_ratio_of_rates, *of_one.T, *of_other.T)
    return {**found._asdict(), "ratio": float(rate(one.sum(0)) / rate(other.sum(0)))}


def _ratio_of_rates(own_s: Any, own_work: Any, other_s: Any, other_work: Any, axis: int) -> Any:
    return own_work.sum(axis) / own_s.sum(axis) / (other_work.sum(axis) / other_s.sum(axis))


def rate(turns: Any) -> Any:
    """[..., 2] seconds and what was done -> [...] tokens of plain decoding per second."""
    return turns[..., 1] / turns[..., 0]


def markdown(result: dict[str, Any]) -> str:
    """A row per cell."""
    names = [name for name in result["cells"][0]["arms"] if name != OFF]
    head = ["prompts", "c", "off tok/s", *(f"{name} vs off (95 % interval)" for name in names)]
    head += ["adaptive vs the best fixed", "adaptive reports"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in result["cells"]:
        arms, best = cell["arms"], cell.get("adaptive_to_best_fixed")
        row = [cell["prompts"], str(cell["concurrency"]), f"{arms[OFF]['tokens_per_second']:.0f}"]
        row += [_shown(arms[name]["ratio_to_off"]) for name in names]
        row += [f"{_shown(best)} {best['arm']}", _reported(arms[ADAPTIVE])] if best else ["-", "-"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def summary_markdown(result: dict[str, Any]) -> str:
    """Return a row per number of requests: plain rate and adaptive's ratio, by prompts; the README's table."""
    cells = {(cell["concurrency"], cell["prompts"]): cell["arms"] for cell in result["cells"]}
    prompts = list(dict.fromkeys(name for _, name in cells))
    head = ["requests at once", *(text for name in prompts for text in (f"{name}, plain", "with drafts"))]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for concurrency in dict.fromkeys(number for number, _ in cells):
        row = [str(concurrency)]
        for name in prompts:
            arms = cells[concurrency, name]
            row += [f"{arms[OFF]['tokens_per_second']:.0f} tokens/s", _shown(arms[ADAPTIVE]["ratio_to_off"])]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def is_shape(name: str) -> bool:
    """Whether an arm has a fixed shape (`rule:KxL`)."""
    return ":" in name


def chart(result: dict[str, Any], file: Path) -> None:
    """Draw every arm's rate over plain decoding, by cell, with intervals."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cells = result["cells"]
    names = [name for name in cells[0]["arms"] if name == ADAPTIVE or is_shape(name)]
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [cell["arms"][name]["ratio_to_off"] for cell in cells]
        places = np.arange(len(cells)) + (number - (len(names) - 1) / 2) * width
        heights = np.array([one["ratio"] for one in found])
        errors = np.array([[one["ratio"] - one["low"], one["high"] - one["ratio"]] for one in found]).T
        axes.bar(places, heights, width, yerr=errors, label=name, error_kw={"linewidth": 0.8})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(np.arange(len(cells)), [f"{cell['prompts']}\n{cell['concurrency']} at once" for cell in cells])
    axes.set_ylabel("speed over plain decoding")
    figure.legend(fontsize=8, loc="outside upper center", ncols=len(names))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def reported_markdown(result: dict[str, Any]) -> str:
    """What answers report beside what was measured, a row per cell."""
    names = [name for name in result["cells"][0]["arms"] if name not in (OFF, AGAIN)]
    head = ["prompts", "c", *(f"{name}: measured, reported" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cell in result["cells"]:
        arms = [cell["arms"][name] for name in names]
        shown = [f"{_shown(arm['ratio_to_off'])}, {_reported(arm)}" for arm in arms]
        lines.append("| " + " | ".join([cell["prompts"], str(cell["concurrency"]), *shown]) + " |")
    return "\n".join(lines)


def _reported(arm: dict[str, Any]) -> str:
    """What its answers report; nothing where no step told how long a plain one would have taken."""
    speedup = arm["reported_speedup"]
    return "-" if speedup is None else f"{speedup:.2f}x"


def _shown(found: dict[str, float]) -> str:
    return f"{found['ratio']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"
