"""Cases of a test: `make test` runs a part, and `make test-all` the whole rest."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

SEED = "GRID_SEED"
_SLOW_FIXTURE = "is_slow_fixture"

Fixture = TypeVar("Fixture", bound=Callable[..., Any])

FAMILIES = ("token", "rrs", "greedy", "weighted_race", "bv_race", "spectr_gbv", "traversal")
"""One rule of each family for `make test`; `make test-all` has all rules.

Families decide by single tokens, by nodes without and with sorted drafts, by a race over nodes, by
whole chains, by chains that change later targets, and by trees.
"""


def grid(cases: Iterable[Any], in_the_gate: Container[Any]) -> list[ParameterSet]:
    """Return parameters of which all but those in the gate are `slow`.

    A case of several values is a tuple.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in in_the_gate else pytest.mark.slow
        )
        for case in cases
    ]


def slow_fixture(fixture: Fixture) -> Fixture:
    """Mark a fixture that costs seconds: tests that use it are `slow`, unless they are `sole`."""
    setattr(fixture, _SLOW_FIXTURE, True)
    return fixture


def grid_seed() -> str:
    """Return the word that chooses cases: of the environment, else the commit, else a constant."""
    if SEED not in os.environ:
        words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        try:
            commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "none"
        os.environ[SEED] = commit  # also for the workers
    return os.environ[SEED]


def mark_slow(items: Iterable[pytest.Item], seed: str) -> None:
    """Mark tests of slow fixtures, and the cases of sampled tests that this seed does not choose.

    Of a test that is marked `sampled` one case is chosen; `sampled("rule")` chooses one of each
    rule. Cases that are marked `slow` are not chosen.
    """
    kinds: defaultdict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _has_slow_fixture(item) and item.get_closest_marker("sole") is None:
            item.add_marker(pytest.mark.slow)
        marker = item.get_closest_marker("sampled")
        if marker is not None and item.get_closest_marker("slow") is None:
            parameters = item.callspec.params  # type: ignore[attr-defined]
            function = item.nodeid.partition("[")[0]
            kinds[function, *(str(parameters[name]) for name in marker.args)].append(item)
    for cases in kinds.values():
        digest = hashlib.sha256(f"{seed} {cases[0].nodeid}".encode()).digest()
        chosen = cases[int.from_bytes(digest) % len(cases)]
        for case in cases:
            if case is not chosen:
                case.add_marker(pytest.mark.slow)


def _has_slow_fixture(item: pytest.Item) -> bool:
    fixtures = getattr(item, "_fixtureinfo", None)
    if fixtures is None:
        return False
    return any(hasattr(found[-1].func, _SLOW_FIXTURE) for found in fixtures.name2fixturedefs.values())
