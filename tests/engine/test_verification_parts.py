"""Rows that can be verified together are, and get what they get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import engine.verifying as verifying
from engine.request import Request, Speculation
from tests.engine import tiny

PLAIN, BLOCK = tiny.OFF, Speculation(rule="block", num_drafts=1, draft_length=3)
ONE, RACE = (Speculation(rule="bv_race", num_drafts=count, draft_length=3) for count in (1, 3))
GREEDY = Speculation(rule="greedy", num_drafts=3, draft_length=2)
TARGET = tiny.llama(1)
DRAFT = tiny.perturbed(TARGET, 2, 0.05)


def requests(*speculations: Speculation, temperature: float = 1.0) -> list[Request]:
    return [
        tiny.request(str(i), range(5, 20), one, 30, temperature=temperature, seed=7)
        for i, one in enumerate(speculations)
    ]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Verifications by step."""
    parts: Callable[..., Any] = verifying._parts
    counts: list[int] = []

    def counting(*arguments: Any) -> list[Any]:
        found = list(parts(*arguments))
        counts.append(len(found))
        return found

    monkeypatch.setattr(verifying, "_parts", counting)
    return counts


@pytest.mark.parametrize(
    ("together", "most"),
    [
        ((PLAIN, BLOCK, ONE), 1),
        ((PLAIN, BLOCK, ONE, RACE), 1),
        ((PLAIN, GREEDY), 2),
        ((PLAIN, BLOCK, RACE, GREEDY), 2),
    ],
)
def test_rows_share_a_verification(
    together: tuple[Speculation, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted(monkeypatch)
    run = tiny.run(tiny.build(TARGET, DRAFT), requests(*together))
    assert max(counts) == most
    for name, one in enumerate(together):
        alone = tiny.run(tiny.build(TARGET, DRAFT), requests(one)).tokens["0"]
        assert run.tokens[str(name)] == alone


def test_a_race_of_one_chain_is_block_verification() -> None:
    run = tiny.run(tiny.build(TARGET, DRAFT), requests(BLOCK, ONE))
    assert run.tokens["0"] == run.tokens["1"]
    assert run.num_accepted > 10


def test_certain_rows_keep_their_own_rule() -> None:
    certain = requests(RACE, BLOCK, PLAIN, temperature=0.0)
    answers = tiny.run(tiny.build(TARGET, DRAFT), certain).tokens
    assert answers["0"] == answers["1"] == answers["2"]
