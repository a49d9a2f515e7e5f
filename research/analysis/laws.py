"""`analyze laws` and `analyze blocks`: exact value of given distributions.

Not for: models (`pair.py`).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.speculation import theory
from engine.speculation.verification import RULES
from tests.oracles import bounds
from tests.oracles.enumeration import Rows, TabularModel, expected_accepted, first_block_law, rule_outcomes
from tests.oracles.node_enumeration import enumerated_acceptance

_SUM_TOLERANCE = 1e-6
_MOST_TUPLES = 50_000


def read_law(entry: Any, name: str, where: str) -> theory.Law:
    """Return a probability vector of an entry, normalised; raise ConfigError with the place of the
    fault.
    """
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
    """Return optima and acceptances of one entry; None if there is neither a closed form nor a
    feasible enumeration.
    """
    p, q = read_law(entry, "p", where), read_law(entry, "q", where)
    n = entry.get("n", 1)
    if len(p) != len(q):
        raise ConfigError(f"{where}: p has {len(p)} entries and q has {len(q)}")
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ConfigError(f"{where}: 'n' must be a positive integer, not {n!r}")
    acceptance: dict[str, float | None] = {}
    for name, rule in RULES.items():
        if rule.acceptance is not None:
            acceptance[name] = rule.acceptance(p, q, n)
        else:
            assert rule.node_rule is not None, name
            acceptance[name] = enumerated_acceptance(rule.node_rule, "without_replacement", p, q, n)
    return {
        "alpha_star": {
            "iid": theory.alpha_star_iid(p, q, n),
            "without_replacement": theory.alpha_star_without_replacement(p, q, n),
            "greedy": theory.alpha_star_greedy(p, q, n),
        },
        "acceptance": acceptance,
    }


def read_entries(file: Path, what: str) -> list[dict[str, Any]]:
    """Return the list of objects in a JSON file; raise ConfigError for any other content."""
    try:
        entries = json.loads(file.read_text(encoding="utf8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{file}: must hold a list of {what}")
    return entries


def analyze_laws(file: Path) -> list[dict[str, Any]]:
    """Analyze all entries of a file of distributions."""
    entries = read_entries(file, '{"p": [...], "q": [...], "n": k}')
    return [analyze_law(entry, f"{file}, entry {number}") for number, entry in enumerate(entries)]


def read_model(entry: Any, where: str) -> tuple[TabularModel, int]:
    """Return (the distributions of every prefix, the number of chains) of an entry of blocks."""
    numbers = {}
    for name in ("V", "L", "K"):
        value = entry.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{where}: {name!r} must be a positive integer, not {value!r}")
        numbers[name] = value
    vocabulary, length, num_chains = numbers["V"], numbers["L"], numbers["K"]
    if (vocabulary**length) ** num_chains > _MOST_TUPLES:
        raise ConfigError(
            f"{where}: (V^L)^K = {(vocabulary**length) ** num_chains} tuples of chains are too many to enumerate "
            f"(at most {_MOST_TUPLES})"
        )
    rows = entry.get("rows")
    if not isinstance(rows, dict):
        raise ConfigError(f'{where}: \'rows\' must map prefixes such as "0,1" to {{"p": [...], "q": [...]}}')
    target: dict[tuple[int, ...], theory.Law] = {}
    draft: dict[tuple[int, ...], theory.Law] = {}
    for depth in range(length + 1):
        for prefix in itertools.product(range(vocabulary), repeat=depth):
            key = ",".join(map(str, prefix))
            row, place = rows.get(key), f"{where}, row {key!r}"
            if row is None:
                # A prefix that has probability 0 under both distributions may be omitted.
                row = {"p": [1 / vocabulary] * vocabulary, "q": [1 / vocabulary] * vocabulary}
                if not _unreachable(prefix, target, draft):
                    raise ConfigError(f"{place}: is missing")
            if not isinstance(row, dict):
                raise ConfigError(f"{place}: must hold p and q")
            target[prefix], draft[prefix] = read_law(row, "p", place), read_law(row, "q", place)
            if len(target[prefix]) != vocabulary or len(draft[prefix]) != vocabulary:
                raise ConfigError(f"{place}: p and q must have {vocabulary} entries")
    return TabularModel(target, draft, vocabulary, length), num_chains


def _unreachable(prefix: tuple[int, ...], target: Rows, draft: Rows) -> bool:
    return all(
        any(np.asarray(rows[prefix[:i]])[token] == 0 for i, token in enumerate(prefix)) for rows in (target, draft)
    )


def analyze_block(entry: Any, where: str) -> dict[str, Any]:
    """Return E[tau] and the distribution of "accepted|next" of every rule on K chains of L tokens,
    by enumeration.

    Chains are i.i.d. for the rules that support them; `greedy` and `spechub` draw the first tokens
    by their own methods. Rules for fewer chains use as many as they can.
    """
    model, num_chains = read_model(entry, where)
    expected: dict[str, float | None] = {}
    laws: dict[str, dict[str, float] | None] = {}
    for name, rule in RULES.items():
        if rule.max_vocabulary is not None and model.vocabulary > rule.max_vocabulary:
            expected[name], laws[name] = None, None
            continue
        method = "iid" if "iid" in rule.draft_methods else rule.draft_methods[0]
        count = min(num_chains, rule.max_drafts or num_chains)
        outcomes = rule_outcomes(name, model, (count, *(1,) * (model.length - 1)), method)
        expected[name], laws[name] = expected_accepted(outcomes), first_block_law(outcomes)

    def laws_below(prefix: tuple[int, ...]) -> tuple[theory.Law, theory.Law]:
        return np.asarray(model.target[prefix]), np.asarray(model.draft[prefix])

    bound = bounds.block_length_bound(laws_below, model.vocabulary, model.length, num_chains)
    return {"E_tau": expected, "first_block_law": laws, "upper_bound": bound}


def analyze_blocks(file: Path) -> list[dict[str, Any]]:
    """Analyze all entries of a file of blocks."""
    entries = read_entries(file, '{"V": ..., "L": ..., "K": ..., "rows": {prefix: {"p": [...], "q": [...]}}}')
    return [analyze_block(entry, f"{file}, entry {number}") for number, entry in enumerate(entries)]
