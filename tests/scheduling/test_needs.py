"""Needs of each kind of row; a planned row has the needs of the row that is built from it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.needs import LOSSY, RULE, SEED_STABLE, TEXT, TEXT_DRAFTS, TREE
from engine.request import Limits, Request, Sampling, Speculation
from engine.scheduling.rows import plan_row, row_of
from engine.scheduling.sequence import Sequence

RACE = Speculation(rule="bv_race", num_drafts=2, draft_length=3)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({"speculation": Speculation()}, 0),
    "chains that race": ({"speculation": RACE}, 0),
    "one block": ({"speculation": msgspec.structs.replace(RACE, rule="block", num_drafts=1)}, 0),
    "another rule": ({"speculation": msgspec.structs.replace(RACE, rule="token")}, RULE),
    "another rule without drafts": ({"speculation": Speculation(rule="token")}, 0),
    "a tree": ({"speculation": msgspec.structs.replace(RACE, num_drafts=4, tree=(2, 2, 1))}, TREE),
    "draws that depend on each other": (
        {"speculation": msgspec.structs.replace(RACE, draft_method="without_replacement")},
        TREE,
    ),
    "lossy": ({"speculation": msgspec.structs.replace(RACE, rule="token", over_acceptance=0.1)}, RULE | LOSSY),
    "text drafts": (
        {"speculation": msgspec.structs.replace(RACE, drafters=("model", "prompt_lookup"))},
        TEXT_DRAFTS,
    ),
    "a penalty": ({"speculation": RACE, "sampling": Sampling(presence_penalty=1.0)}, TEXT),
    "least tokens": ({"speculation": RACE, "limits": Limits(max_tokens=20, min_tokens=5)}, TEXT),
    "a seed that stays": ({"speculation": RACE, "sampling": Sampling(seed_stable=True)}, SEED_STABLE),
}


@pytest.mark.parametrize("name", CASES)
def test_row_needs_are_those_of_its_plan(name: str) -> None:
    options, needs = CASES[name]
    request = Request(
        **{"request_id": "0", "prompt_token_ids": (3, 4, 5, 3, 4), "limits": Limits(max_tokens=20), **options}
    )
    part = plan_row(Sequence(0, request, 0.0), request.speculation.fanout, 64, 8, None)
    assert part.emits
    assert part.needs == needs
    assert row_of(part).needs == needs
