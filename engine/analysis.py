"""`polydraft analyze`: what draft laws are worth, without serving anything.

`analyze laws FILE` reads JSON `[{"p": [...], "q": [...], "n": k}, ...]` and prints, per entry, the optimum of
every draft method and the acceptance of every rule at one position, in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.speculation import theory
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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="polydraft analyze", description="What draft laws are worth.")
    commands = result.add_subparsers(dest="command", required=True)
    laws = commands.add_parser("laws", help="optimum and acceptance of every rule at one position")
    laws.add_argument("file", type=Path, help='JSON: [{"p": [...], "q": [...], "n": k}, ...]')
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one analysis; 0, or 2 for bad input."""
    options = parser().parse_args(arguments)
    try:
        print(json.dumps(analyze_laws(options.file)))
    except ConfigError as error:
        print(f"polydraft analyze: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
