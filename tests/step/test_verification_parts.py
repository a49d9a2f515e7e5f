"""Rows that can be verified together are, and get what they get alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import engine.step.verify as verifying
from engine.plan import Row
from engine.request import Request, Sampling, Speculation
from engine.speculation.verification import RULES, OverAcceptance
from engine.speculation.verification.chain_rules import verify_certain
from engine.step.verify import verified_together
from tests.engine import tiny
from tests.wrong import by_distributions, instead

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


@pytest.fixture
def counts() -> Iterator[list[int]]:
    """Verifications by step."""
    counts: list[int] = []

    def counting(verified_together: Any, *operands: Any) -> list[Any]:
        found = list(verified_together(*operands))
        counts.append(len(found))
        return found

    with by_distributions(), instead(verifying, "verified_together", counting):
        yield counts


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("together", "most"),
    [
        ((PLAIN, BLOCK, ONE), 1),
        ((PLAIN, BLOCK, ONE, RACE), 1),
        ((PLAIN, GREEDY), 2),
        ((PLAIN, BLOCK, RACE, GREEDY), 2),
    ],
)
def test_rows_share_a_verification(together: tuple[Speculation, ...], most: int, counts: list[int]) -> None:
    run = tiny.run(tiny.build(TARGET, DRAFT), requests(*together))
    assert max(counts) == most
    for name, one in enumerate(together):
        alone = tiny.run(tiny.build(TARGET, DRAFT), requests(one)).tokens["0"]
        assert run.tokens[str(name)] == alone


def test_a_race_of_one_chain_is_block_verification() -> None:
    run = tiny.run(tiny.build(TARGET, DRAFT), requests(BLOCK, ONE))
    assert run.tokens["0"] == run.tokens["1"]
    assert run.num_accepted > 10


def test_greedy_rows_use_their_own_rule() -> None:
    certain = requests(RACE, BLOCK, PLAIN, temperature=0.0)
    answers = tiny.run(tiny.build(TARGET, DRAFT), certain).tokens
    assert answers["0"] == answers["1"] == answers["2"]


def row(speculation: Speculation) -> Row:
    """A row that drafts what it asks for."""
    return Row(
        sequence_id=0,
        input_ids=(1,),
        first_index=9,
        draft_input_ids=(1,),
        draft_first_index=9,
        block_ids=(0,),
        emits=True,
        sampling=Sampling(),
        speculation=speculation,
        fanout=(speculation.num_drafts,) + (1,) * (speculation.draft_length - 1) if speculation.num_drafts else (),
    )


def parts(rows: list[Row], vocab_size: int = 10, by_tiles: bool = False, **memory: int) -> list[tuple[Any, list[int]]]:
    return list(verified_together(rows, np.array([bool(one.fanout) for one in rows]), vocab_size, by_tiles, **memory))


def test_the_race_and_block_verification_share_a_part() -> None:
    """Rows without drafts are in it; other rules have separate parts."""
    block, race, traversal = (RULES[name].verify for name in ("block", "bv_race", "traversal"))
    four = Speculation(rule="traversal", num_drafts=4, draft_length=2)
    two = Speculation(rule="bv_race", num_drafts=2, draft_length=3)
    assert parts([row(one) for one in (PLAIN, BLOCK, ONE)]) == [(block, [0, 1, 2])]
    assert parts([row(one) for one in (PLAIN, two, BLOCK, ONE)]) == [(race, [0, 1, 2, 3])]
    assert parts([row(one) for one in (four, PLAIN, ONE)]) == [(traversal, [0]), (block, [1, 2])]
    certain = msgspec.structs.replace(row(two), sampling=Sampling(temperature=0.0))
    assert parts([certain, row(BLOCK)]) == [(verify_certain, [0]), (block, [1])]
    token = Speculation(rule="token", num_drafts=1, draft_length=2)
    assert parts([row(token), row(BLOCK)]) == [(RULES["token"].verify, [0]), (block, [1])]
    lossy = Speculation(rule="block", num_drafts=1, draft_length=2, over_acceptance=0.3)
    ((verify, numbers),) = parts([row(lossy)])
    assert (verify, numbers) == (OverAcceptance(0.3, lossy.over_acceptance_residual), [0])


def test_parts_stay_within_their_memory() -> None:
    """A chain needs 100 of 1,000 bytes (10 with sums of tiles); a row is always taken."""

    def sizes(rows: list[Row], by_tiles: bool = False) -> list[int]:
        found = parts(rows, by_tiles=by_tiles, most_bytes=1000, chain_bytes=10)
        assert sorted(number for _, numbers in found for number in numbers) == list(range(len(rows)))
        return [len(numbers) for _, numbers in found]

    assert sizes([row(BLOCK)] * 25) == [10, 10, 5]
    assert sizes([row(PLAIN)] * 12) == [10, 2]
    assert sizes([row(RACE)] * 7) == [3, 3, 1]
    assert sizes([row(RACE)] * 35, by_tiles=True) == [33, 2]
    assert sizes([row(GREEDY)] * 4, by_tiles=True) == [3, 1]
    assert sizes([row(RACE), row(RACE), row(BLOCK), row(RACE), row(RACE)]) == [4, 1]
    wide = Speculation(rule="nss", num_drafts=20, draft_length=1)
    assert sizes([row(wide)] * 2) == [1, 1]
