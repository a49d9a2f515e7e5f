"""`polydraft analyze`: what draft laws are worth, without serving anything.

`analyze laws FILE` reads JSON `[{"p": [...], "q": [...], "n": k}, ...]` and prints, per entry, the optimum of
every draft method and the acceptance of every rule at one position, in float64.
`analyze times` measures how long every rule takes on this machine, by chains and vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from engine.errors import ConfigError
from engine.speculation import theory
from engine.speculation.timing import rule_seconds
from engine.speculation.verification import RULES

_SUM_TOLERANCE = 1e-6


def read_law(entry: Any, name: str, where: str) -> theory.Law:
    """A probability vector of an entry, normalised; raises ConfigError with the place of the fault."""
    try:
        law = np.array(entry[name], dtype=np.float64)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {name!r} must be a list of numbers") from error
    if law.ndim != 1 or not len(law) or not np.isfinite(law).all() or (law < 0).any():
        raise ConfigError(f"{where}: {name!r} must be a list of finite numbers that are not negative")
    if abs(law.sum() - 1) > _SUM_TOLERANCE:
        raise ConfigError(f"{where}: {name!r} sums to {law.sum():.6g}, not 1")
    normalised: theory.Law = law / law.sum()
    return normalised


def analyze_law(entry: Any, where: str) -> dict[str, Any]:
    """Optima and acceptances of one entry; None where there is neither a closed form nor a feasible enumeration."""
    p, q = read_law(entry, "p", where), read_law(entry, "q", where)
    n = entry.get("n", 1)
    if len(p) != len(q):
        raise ConfigError(f"{where}: p has {len(p)} entries and q has {len(q)}")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"{where}: 'n' must be a positive integer, not {n!r}")
    acceptance: dict[str, float | None] = {}
    for name in RULES:
        try:
            acceptance[name] = theory.ACCEPTANCE[name](p, q, n)
        except ValueError:
            acceptance[name] = None
    return {
        "alpha_star": {
            "iid": theory.alpha_star_iid(p, q, n),
            "without_replacement": theory.alpha_star_without_replacement(p, q, n),
            "greedy": theory.alpha_star_greedy(p, q, n),
        },
        "acceptance": acceptance,
    }


def analyze_laws(file: Path) -> list[dict[str, Any]]:
    """All entries of a file; raises ConfigError for a file that is not as described."""
    try:
        entries = json.loads(file.read_text(encoding="utf8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f'{file}: must hold a list of {{"p": [...], "q": [...], "n": k}}')
    return [analyze_law(entry, f"{file}, entry {number}") for number, entry in enumerate(entries)]


def analyze_times(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per verification by rule, chains and vocabulary; a table goes to standard error."""
    torch.set_num_threads(options.threads)
    cells = [
        (rule, chains, vocabulary)
        for rule in RULES
        for chains in options.num_drafts
        if chains <= (RULES[rule].max_drafts or chains)
        for vocabulary in options.vocabulary
    ]
    results = []
    for rule, chains, vocabulary in tqdm(cells, desc="rules", unit="cell"):
        seconds = rule_seconds(rule, options.requests, chains, options.draft_length, vocabulary, options.repeats)
        results.append({"rule": rule, "num_drafts": chains, "vocabulary": vocabulary, "milliseconds": 1000 * seconds})
    print("| rule | drafts | vocabulary | ms per step |\n| --- | --- | --- | --- |", file=sys.stderr)
    for cell in results:
        row = f"{cell['rule']} | {cell['num_drafts']} | {cell['vocabulary']} | {cell['milliseconds']:.2f}"
        print(f"| {row} |", file=sys.stderr)
    return {
        "requests": options.requests,
        "draft_length": options.draft_length,
        "threads": options.threads,
        "repeats": options.repeats,
        "cells": results,
    }


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="polydraft analyze", description="What draft laws are worth.")
    commands = result.add_subparsers(dest="command", required=True)
    laws = commands.add_parser("laws", help="optimum and acceptance of every rule at one position")
    laws.add_argument("file", type=Path, help='JSON: [{"p": [...], "q": [...], "n": k}, ...]')
    times = commands.add_parser("times", help="time per verification step of every rule on this machine")
    times.add_argument("--num-drafts", type=_integers, default=[1, 2, 4], help="chains, e.g. 1,2,4")
    times.add_argument("--vocabulary", type=_integers, default=[4096, 32000, 152000], help="sizes, e.g. 4096,152000")
    times.add_argument("--draft-length", type=int, default=5, help="tokens in a chain (default 5)")
    times.add_argument("--requests", type=int, default=1, help="requests verified together (default 1)")
    times.add_argument("--repeats", type=int, default=5, help="timed runs; the median is printed (default 5)")
    times.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one analysis; 0, or 2 for bad input."""
    options = parser().parse_args(arguments)
    try:
        print(json.dumps(analyze_laws(options.file) if options.command == "laws" else analyze_times(options)))
    except ConfigError as error:
        print(f"polydraft analyze: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
