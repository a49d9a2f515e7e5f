"""Markdown tables of a bench result (`plots.py` draws it)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loadtest.results import shown_ratio, table

if TYPE_CHECKING:
    from loadtest.statistics import Ratio


def markdown(result: dict[str, Any]) -> str:
    """Return one row per cell.

    Plain tokens per second, then ratio and tokens per pass of every other arm.
    """
    arms = [arm for arm in result["options"]["arms"] if arm != "off"]
    head = ["prompts", "c", "acceptance of one draft", "off tok/s"]
    for arm in arms:
        head += [f"{arm} vs off (95 % interval)", f"{arm} tokens/pass"]
    rows = []
    for cell in result["cells"]:
        row = [
            prompts_of(cell, result),
            str(cell["concurrency"]),
            "-" if (acceptance := cell["single_draft_acceptance"]) is None else f"{acceptance:.2f}",
            f"{cell['arms']['off']['tokens_per_second']:.0f}",
        ]
        for arm in arms:
            measured = cell["arms"][arm]
            row.append(shown_ratio(measured["ratio_to_off"]))
            tokens = tokens_per_pass(measured)
            row.append("-" if tokens is None else f"{tokens.ratio:.2f}")
        rows.append(row)
    return table(head, rows)


def tokens_per_pass(measured: dict[str, Any]) -> Ratio | None:
    """Return an arm's tokens per target pass; None if it has no drafts.

    Results of versions without that figure have the tokens of passes with drafts in its place.
    """
    from loadtest.statistics import Ratio  # it imports numpy, which the help does not need

    name = "tokens_per_pass" if "tokens_per_pass" in measured else "mean_acceptance_length"
    if name not in measured:
        return None
    ratio = measured[name]
    return Ratio(ratio, *measured.get(f"{name}_interval", (ratio, ratio)))


def prompts_of(cell: dict[str, Any], result: dict[str, Any]) -> str:
    """Return a description of a cell's prompts, with the temperature if several were measured."""
    text = f"{cell['context']} random tokens" if cell.get("context") else str(cell["task"])
    return text + temperature_of(cell, result)


def temperature_of(cell: dict[str, Any], result: dict[str, Any]) -> str:
    """Return a cell's temperature if several were measured."""
    return f", T = {cell['temperature']:g}" if len(result["options"].get("temperatures", ())) > 1 else ""


def rules_markdown(result: dict[str, Any]) -> str:
    """Return one row per cell and rule.

    Tokens per pass with interval, nodes per pass, ratio to plain decoding.
    """
    head = ["prompts", "c", "rule", "drafts", "tokens/pass (95 % interval)", "nodes/pass", "vs off (95 % interval)"]
    rows = []
    for cell in result["cells"]:
        for arm, measured in cell["arms"].items():
            if "num_drafts" not in result["options"]["arms"][arm]:
                continue
            tokens = tokens_per_pass(measured)
            if tokens is None:
                continue
            num_drafts = result["options"]["arms"][arm]["num_drafts"]
            shown = f"{tokens.ratio:.2f} ({tokens.low:.2f}-{tokens.high:.2f})"
            row = [prompts_of(cell, result), cell["concurrency"], arm, num_drafts, shown]
            rows.append([*row, f"{measured['nodes_per_pass']:.1f}", shown_ratio(measured["ratio_to_off"])])
    return table(head, rows)


def versions_markdown(result: dict[str, Any]) -> str:
    """Return one row per cell and arm, with tokens per second and reported speedup.

    Before and now, and their ratio.
    """
    head = ["prompts", "c", "arm", "before tok/s", "now tok/s", "now over before (95 % interval)", "speedup reported"]
    rows = []
    for cell in result["cells"]:
        for arm, now in cell["arms"].items():
            if "ratio_to_before" not in now:
                continue
            both = (cell["arms"][f"before {arm}"], now)
            rates = [f"{one['tokens_per_second']:.0f}" for one in both]
            reported = [f"{one['reported_speedup']:.2f}x" if one.get("reported_speedup") else "-" for one in both]
            ratio = shown_ratio(now["ratio_to_before"])
            rows.append([prompts_of(cell, result), cell["concurrency"], arm, *rates, ratio, ", ".join(reported)])
    return table(head, rows)
