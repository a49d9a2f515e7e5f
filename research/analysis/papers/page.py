"""Page of tables: the paper's statements, measurements, and reasons for differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.results import table
from research.analysis.papers.blocks import NAMES, by_task, falls
from research.analysis.papers.grid import ONE_CHAIN, SEVERAL
from research.analysis.report import number

_TITLES = {
    "optimal": "Towards Optimal Multi-draft Speculative Decoding",
    "blocks": "SpecTr-GBV",
    "theoretical": "A Theoretical Perspective for Speculative Decoding Algorithm",
    "races": "Beyond: the score race and the weighted race at equal numbers of drafts",
}


_OF_OPTIMAL = """
Its tables are of LLaMA, OPT, Vicuna and Qwen2 pairs on Alpaca, WMT14 and CNN/DM. The pair here is small and its draft
agrees with it more often, so the optima are higher. How far a rule stays below the optimum depends on both laws, so a
gap may be smaller or larger than the paper's. All temperatures are measured at the same positions of texts that the
target wrote at temperature 1, so rows differ by the temperature alone. Where the temperature is low, greedy drafts are
slightly ahead of drafts without replacement: there both are nearly the likeliest tokens. For rules without a closed
form, acceptance is the mean over draws of the drafts, so their gaps may be off by a few tenths of a point.
""".strip()
_OF_BLOCKS = """
The paper (K = 3, T = 0.4, L = 8 or 12, DeepSeek 33B with 1.3B, mean of five sets): SD 7.64, SpecTr 8.39, GBV 7.83,
SpecTr-GBV 8.59 tokens a pass; speedups 1.64, 1.96, 1.67, 2.12. The embedded pair agrees less: its target has 15
million parameters and knows no code, and held-out dialogues stand for LM1B. The order of the rules is what can be
compared. SpecTr-GBV and GBV change the target of the steps after a block, and so agree less with the draft there: the
exact rule gains over K-SEQ in its first block, not always in the long run; the authors' program leaves that change
out and is not lossless (docs/speculation-rules.md).
""".strip()
_CLOSED_FORMS = """
Closed forms: tokens that the engine accepted in each step, and what the rule's formula expects there, along the text
that followed (dialogues, L = 8, T = 1). For SpecTr-GBV the formula is a lower bound, which the paper's rule meets and
the exact one here may exceed.
""".strip()
_THEOREM_1 = """
**Theorem 1** on the served rule `token`: rejections counted in the engine's steps, and the sum of TV(p, q) over the
positions that were verified. The token behind a wholly accepted chain is verified against no draft and counts as
neither, which is why a shorter lookahead has fewer of both.
""".strip()
_THEOREM_3 = """
**Theorem 3** on a Markov chain of seven states whose laws change with the position, fifty tokens (the paper's
simulations have such chains; its own laws are not published). More drafts at a restart have a limit above zero,
because the tokens after it are verified against one draft each.
""".strip()
_THEOREM_5 = """
**Theorem 5**: over-acceptance at single positions of the pair. Decoding-OPT lies on the line where rejection and
distance add up to TV(p, q), Decoding-UNO above it.
""".strip()
_OF_ANSWERS = """
Whole answers of the engine with `over_acceptance` (five tokens a chain). The paper compares Pythia 2.8B and 70M on
AlpacaFarm with reward models and GPT-4 as judges, where OPT wins more than half at every eps; the judge here is the
target's log-likelihood of the answer. Over-acceptance writes what the draft model finds likely, which the target may
find likely too, so log-likelihood alone is no measure of exactness: the distances above are.
""".strip()
_PROOF = "../speculation-rules.md#the-score-race-several-drafts-one-exact-block-verification"
_OF_RACES = f"""
All shapes draft twelve tokens a pass. Equal tokens of independent chains below the same parent are one node, so that
fewer nodes are verified there; the fourth column counts them. The second pair has chosen laws: a Llama of two layers
with a table of successors, whose draft agrees with it on 0.65 of a single draft's mass. At single positions the
weighted race is the optimum (the first section's tables); over whole chains the score race keeps more in most tables,
because it verifies blocks. [The proof that it is exact]({_PROOF}) takes one page.
""".strip()

_OF_RECORDED = """
**Recorded laws**: what these rules are expected to give, by their closed forms, on the laws along the target's own
texts (i.i.d. drafts). Nothing is drawn but the texts. All shapes are taken at the same positions: those with twelve
more tokens of text behind them. Shapes of twelve single tokens have one position only; there the weighted race attains
the optimum. Greedy rules are taken as if every block were the first of an answer; for SpecTr-GBV the length is a lower
bound.
""".strip()


def write_page(found: dict[str, dict[str, Any]], pictures: Sequence[Path], folder: Path) -> Path:
    """Write papers.md of all measured sections."""
    sections: dict[str, Callable[[Any], str]] = {
        "optimal": _optimal,
        "blocks": _blocks,
        "theoretical": _theoretical,
        "races": _races,
    }
    parts = [
        "# The papers, measured\n\nWritten by `make papers` (`polydraft analyze papers`); do not edit. The numbers are "
        "in the JSON files next to it. Intervals are 95 % bootstraps over answers or runs."
    ]
    for name, write in sections.items():
        if name not in found:
            continue
        settings, machine = found[name]["settings"], found[name]["environment"].get("cpu", "CPU")
        took = f"{found[name]['took_s'] / 60:.0f} minutes on" if "took_s" in found[name] else "on"
        head = (
            f"## {_TITLES[name]}\nPair: `{settings['target']}` with `{settings['draft']}`; "
            f"{settings['prompts_per_task']} prompts a task, answers of up to {settings['tokens']} tokens, "
            f"{settings['positions']} positions; {took} {machine}."
        )
        shown = [f"![{name}]({picture.name})" for picture in pictures if picture.stem == f"papers-{name}"]
        parts.append("\n\n".join([head, write(found[name]["result"]), *shown]))
    file = folder / "papers.md"
    file.write_text("\n\n".join(parts) + "\n")
    return file


def _optimal(result: dict[str, Any]) -> str:
    findings = table(
        ["the paper says", "measured", "as the paper has it"],
        [[one["paper"], one["measured"], "yes" if one["holds"] else "no"] for one in result["findings"]],
    )
    rules = list(result["rows"][0]["acceptance"])

    def cells(row: dict[str, Any]) -> list[str]:
        best = row["alpha_star"]
        optima = [number(best.get(method), 3) for method in ("iid", "without_replacement", "greedy")]
        gaps = []
        for rule in rules:
            optimum = best.get(rule.partition("/")[2])
            gaps.append(number(None if optimum is None else 100 * (optimum - row["acceptance"][rule]), 1))
        return [*optima, *gaps]

    titles = ["alpha* i.i.d.", "w/o replacement", "greedy", *(rule.replace("/", ", ") for rule in rules)]
    rows = [[f"{row['temperature']:g}", row["drafts"], *cells(row)] for row in result["rows"]]
    large = [[row["vocabulary"], row["drafts"], *cells(row)] for row in result["vocabularies"]]
    return "\n\n".join(
        [
            _OF_OPTIMAL,
            findings,
            "The optimum, and points that each rule (with the way its drafts are drawn) stays below it:",
            table(["T", "drafts", *titles], rows),
            "Synthetic distributions over large vocabularies (Zipf's logits, the draft's disturbed), temperature 1:",
            table(["tokens", "drafts", *titles], large),
        ]
    )


def _shown(row: dict[str, Any], name: str, digits: int = 2) -> str:
    """Return a number of a row with its interval."""
    return f"{row[name]:.{digits}f} ({row['low']:.{digits}f}-{row['high']:.{digits}f})"


def _blocks(result: dict[str, Any]) -> str:
    pooled = {(row["temperature"], row["rule"], row["chains"], row["length"]): row for row in result["pooled"]}
    temperatures, counts, lengths = (
        list(dict.fromkeys(row[name] for row in result["pooled"])) for name in ("temperature", "chains", "length")
    )
    tasks = list(dict.fromkeys(cell["task"] for cell in result["cells"]))
    parts = [_OF_BLOCKS]
    for temperature in temperatures:
        titles = ["rule", "chains", *(f"L = {length}" for length in lengths)]
        titles += [f"speedup, L = {length}" for length in lengths] + ["verification, L = 8"]
        rows = []
        for rule in (*ONE_CHAIN, *SEVERAL):
            for chains in (1,) if rule in ONE_CHAIN else counts[1:]:
                found = [pooled[temperature, rule, chains, length] for length in lengths]
                speedups = [f"{row['speedup']:.2f}x" for row in found]
                share = f"{100 * pooled[temperature, rule, chains, 8]['verify_share']:.0f} %"
                rows.append(
                    [NAMES[rule], chains, *(_shown(row, "block_efficiency") for row in found), *speedups, share]
                )
        parts.append(f"Tokens per pass over all five sets, T = {temperature:g}:\n\n" + table(titles, rows))
    names = [(rule, 1 if rule in ONE_CHAIN else 3) for rule in (*ONE_CHAIN, *SEVERAL)]
    rows = []
    for rule, chains in names:
        each = by_task(result["cells"], rule, chains, 8, temperatures[0])
        rows.append([NAMES[rule], chains, *(f"{each[task]:.2f}" for task in tasks)])
    parts.append(
        f"By task, with the paper's L = 8, K = 3 and T = {temperatures[0]:g}:\n\n"
        + table(["rule", "chains", *tasks], rows)
    )
    less = falls(result["pooled"])
    parts.append(
        "More chains never lower the block efficiency by more than the intervals allow."
        if not less
        else f"Fewer tokens a pass with more chains, beyond the intervals: {', '.join(less)}."
    )
    forms = table(
        ["rule", "chains", "steps", "accepted a step", "closed form", "accepted / closed form (95 %)"],
        [
            [
                NAMES[row["rule"]] + (" (first blocks)" if row["first"] else ""),
                row["chains"],
                row["steps"],
                f"{row['accepted']:.3f}",
                f"{row['predicted']:.3f}",
                _shown(row, "ratio", 3),
            ]
            for row in result["closed_forms"]
        ],
    )
    parts.append(_CLOSED_FORMS + "\n\n" + forms)
    laws = table(
        ["rule", "p-value", "cells", "answers"],
        [[NAMES[one["rule"]], f"{one['p_value']:.3f}", one["cells"], one["answers"]] for one in result["laws"]],
    )
    parts.append(
        "The law of each rule's answers against the target's own (G-test; small p-values speak against):\n\n" + laws
    )
    return "\n\n".join(parts)


def _theoretical(result: dict[str, Any]) -> str:
    first = table(
        ["lookahead", "tokens", "rejections a token", "sum of TV a token", "counted / predicted (95 %)"],
        [
            [
                row["lookahead"],
                row["tokens"],
                f"{row['rejections_per_token']:.4f}",
                f"{row['predicted']:.4f}",
                _shown(row, "ratio", 3),
            ]
            for row in result["rejections"]
        ],
    )
    second = table(
        ["M", "Theorem 3", "simulated (95 %)"],
        [[row["batch"], f"{row['predicted']:.3f}", _shown(row, "simulated", 3)] for row in result["batches"]],
    )
    third = table(
        ["eps", "rejection", "distance, OPT", "distance, UNO", "Theorem 5's line"],
        [
            [f"{row['epsilon']:g}", *(f"{row[name]:.4f}" for name in ("rejection", "opt", "uno", "line"))]
            for row in result["front"]
        ],
    )
    titles = ["eps", "tokens/pass, OPT", "UNO", "log-likelihood, OPT", "UNO", "OPT wins (95 %)"]
    rows = []
    for row in result["answers"]:
        uno = row.get("uno")
        rows.append(
            [
                f"{row['epsilon']:g}",
                f"{row['opt']['tokens_per_pass']:.2f}",
                f"{uno['tokens_per_pass']:.2f}" if uno else "-",
                f"{row['opt']['log_likelihood']:.3f}",
                f"{uno['log_likelihood']:.3f}" if uno else "-",
                f"{100 * row['win_rate']:.0f} % ({100 * row['low']:.0f}-{100 * row['high']:.0f})" if uno else "-",
            ]
        )
    return "\n\n".join([_THEOREM_1, first, _THEOREM_3, second, _THEOREM_5, third, _OF_ANSWERS, table(titles, rows)])


def _races(result: dict[str, list[dict[str, Any]]]) -> str:
    parts = [_OF_RACES]
    runs = result["runs"]
    for pair in dict.fromkeys(row["pair"] for row in runs):
        for temperature in dict.fromkeys(row["temperature"] for row in runs):
            rows = [row for row in runs if (row["pair"], row["temperature"]) == (pair, temperature)]
            rows.sort(key=lambda row: -row["tokens_per_pass"])
            shown = [
                [
                    row["rule"],
                    row["drafts"].replace("_", " "),
                    row["size"],
                    f"{row['nodes']:.1f}",
                    _shown(row, "tokens_per_pass"),
                ]
                for row in rows
            ]
            titles = ["rule", "drafts", "shape", "nodes", "tokens/pass (95 %)"]
            parts.append(f"{pair}, T = {temperature:g}:\n\n" + table(titles, shown))
    temperatures = list(dict.fromkeys(row["temperature"] for row in result["recorded"]))
    by_shape: dict[tuple[str, str], dict[float, str]] = {}
    for row in result["recorded"]:
        by_shape.setdefault((row["rule"], row["size"]), {})[row["temperature"]] = _shown(row, "tokens_per_pass")
    titles = ["rule", "shape", *(f"T = {temperature:g}" for temperature in temperatures)]
    recorded = [
        [*shape, *(cells.get(temperature, "-") for temperature in temperatures)] for shape, cells in by_shape.items()
    ]
    parts.append(_OF_RECORDED + "\n\n" + table(titles, recorded))
    return "\n\n".join(parts)
