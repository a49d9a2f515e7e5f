"""Cases of a test: `make test` runs a part, and `make test-all` the whole rest."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

FAMILIES = ("token", "rrs", "greedy", "weighted_race", "bv_race", "spectr_gbv", "traversal")
"""One rule of each family, as `make test` tries them; `make test-all` has all rules. A family
shares how it decides: by single tokens, by nodes without and with sorted drafts, by a race over
nodes, by whole chains, by chains that change later targets, and by trees.
"""


def grid(cases: Iterable[Any], in_the_gate: Container[Any]) -> list[ParameterSet]:
    """Parameters of a test; all cases but those in the gate are marked `slow`. A case of several
    values is a tuple.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if case in in_the_gate else pytest.mark.slow
        )
        for case in cases
    ]
