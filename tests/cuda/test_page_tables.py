"""A recorded step writes the block tables that differ from the last step's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.cuda.recorded.inputs import DISTRIBUTIONS, DRAFT_PAGES, PAGES, StepInputs, StepShape
from engine.drafting.draft import ChainShape, layout_of
from engine.plan import Row
from engine.request import Sampling, Speculation
from tests.wrong import instead

BLOCK, PAGES_OF_TEXT, SEATS = 4, 12, 4
SPARE = {PAGES: 99, DRAFT_PAGES: 98}


def inputs(with_pool: bool) -> StepInputs:
    shape = StepShape(SEATS, 1, 2, DISTRIBUTIONS[0])
    layout = layout_of((ChainShape(shape.fanout, "iid", "iid"),) * SEATS, torch.device("cpu"))
    spare = SPARE if with_pool else {PAGES: SPARE[PAGES]}
    return StepInputs(shape, layout, BLOCK, PAGES_OF_TEXT, spare)


def row(number: int, table: tuple[int, ...], drafts: bool, own: tuple[int, ...] | None) -> Row:
    end = (len(table) - 1) * BLOCK - 2
    return Row(
        sequence_id=number,
        input_ids=(5,),
        first_index=end - 1,
        draft_input_ids=(5,) if drafts else (),
        draft_first_index=end - 1,
        block_ids=table,
        draft_block_ids=own,
        emits=True,
        sampling=Sampling(temperature=1.0, seed=number),
        speculation=Speculation(num_drafts=1, draft_length=2),
        fanout=(1, 1) if drafts else (),
    )


def compare(seed: int, with_pool: bool) -> None:
    """Grow, shrink, change and move tables, and compare with new arrays."""
    chance, reused = random.Random(seed), inputs(with_pool)

    def table() -> tuple[int, ...]:
        return tuple(chance.sample(range(90), chance.randrange(3, 6)))

    tables = [table() for _ in range(SEATS)]
    for _ in range(40):
        number = chance.randrange(SEATS)
        kind = chance.randrange(4)
        if kind == 0 and len(tables[number]) < PAGES_OF_TEXT - 1:
            tables[number] += (chance.randrange(90),)
        elif kind == 1:
            tables[number] = table()
        elif kind == 2:
            tables[number] = tuple(chance.sample(range(90), len(tables[number])))
        else:
            chance.shuffle(tables)
        count = chance.randrange(1, SEATS + 1)
        rows = [
            row(n, one, chance.random() < 0.7, tuple(90 - b for b in one) if with_pool else None)
            for n, one in enumerate(tables[:count])
        ]
        found, expected = reused.of(rows), inputs(with_pool)
        expected.of(rows)
        # Unused text and root tokens keep what a step before wrote; nothing reads them.
        for name, numbers in expected._views.items():
            if name not in ("text", "root"):
                np.testing.assert_array_equal(reused._views[name], numbers, err_msg=name)
        assert found is reused._flat


@pytest.mark.parametrize("with_pool", [False, True])
def test_tables_are_those_of_the_rows(with_pool: bool) -> None:
    for seed in range(5):
        compare(seed, with_pool)


def test_a_table_of_equal_length_may_have_other_blocks() -> None:
    """The wrong variant: a preempted request that comes back reads what others have written."""

    def by_length(write: Any, one: StepInputs, name: str, tables: Any) -> None:
        before = one._written[name]
        write(one, name, [old if len(old) == len(new) else new for old, new in zip(before, tables, strict=False)])

    with instead(StepInputs, "_write_pages", by_length), pytest.raises(AssertionError, match="pages"):
        compare(0, with_pool=False)


def test_blocks_of_a_longer_table_are_removed() -> None:
    def keeps_the_rest(write: Any, one: StepInputs, name: str, tables: Any) -> None:
        pages = one._views[name].copy()
        write(one, name, tables)
        rest = one._views[name] == one._spare_blocks[name]
        one._views[name][rest] = pages[rest]

    with instead(StepInputs, "_write_pages", keeps_the_rest), pytest.raises(AssertionError, match="pages"):
        compare(0, with_pool=False)
