"""Programs of the attention kernel: parts of tiles that each one computes."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

attention_kernel = pytest.importorskip("engine.cuda.attention_kernel")

from tests.engine import tiny  # noqa: E402
from tests.grid import grid  # noqa: E402


class Shares(NamedTuple):
    """Programs of a pass for a model with 32 heads, of which 8 are of keys."""

    launched: int
    with_work: int
    most_tiles: int
    """Tiles of keys that the longest program reads."""
    num_parts: int


def shares_of(
    lengths: list[int], counts: list[int] | None = None, planned_keys: int = 0, processors: int = 132
) -> Shares:
    """Find the work of all programs of a pass, and check that each part has one.

    planned_keys: of the longest text of a recorded step; 0 is a step that is not.
    """
    counts = counts or [1] * len(lengths)
    num_heads, tile_keys = 8, 64
    tile_queries = attention_kernel.tile_queries_of(max(counts), 4, torch.bfloat16)
    padded = max(counts) if planned_keys else 0
    num_tiles = attention_kernel.tiles_of(len(counts), sum(counts), padded, tile_queries)
    most_added = -(-attention_kernel._PROGRAMS * processors // num_heads)
    work = max(sum(lengths), sum(count * length for count, length in zip(counts, lengths, strict=True)) // tile_queries)
    part_bytes = (padded * len(counts) or sum(counts)) * 32 * 128 * 4
    most_parts = attention_kernel.parts_of(
        planned_keys or max(lengths), 0 if planned_keys else work, part_bytes, most_added
    )
    launched = num_tiles + min(most_added, num_tiles * (most_parts - 1))
    table = torch.full((launched, 16), -1, dtype=torch.int32, device=tiny.DEVICE)
    rows = [max(count, padded) for count in counts]
    starts = [sum(rows[:number]) for number in range(len(rows))]
    limits = [length for length, count in zip(lengths, rows, strict=True) for _ in range(count)]
    arrays = starts, counts, [0] * len(counts), lengths, lengths, limits, limits
    operands = [torch.tensor(array, dtype=torch.int32, device=tiny.DEVICE) for array in arrays]
    sizes = len(counts), padded, most_parts, most_added, attention_kernel._PART_KEYS
    tiles = {"tile_queries": tile_queries, "tile_keys": tile_keys}
    attention_kernel._divide[(launched,)](table, *operands, 0, *sizes, **tiles, has_window=False, in_chunks=False)
    found = [row for row in table.tolist() if row[0]]
    parts = {sequence: num_parts for _, _, _, sequence, _, num_parts, *_ in found}
    expected = [
        (sequence, tile, part)
        for sequence, count in enumerate(rows)
        for tile in range(-(-count // tile_queries))
        for part in range(parts[sequence])
    ]
    programs = [(row[3], (row[2] - starts[row[3]]) // tile_queries, row[4]) for row in found]
    assert programs == expected
    check_keys(found, lengths)
    most_tiles = max(math.ceil((stop - first) / tile_keys) for *_, first, _, stop, _ in (row[:10] for row in found))
    return Shares(launched * num_heads, len(found) * num_heads, most_tiles, most_parts)


def check_keys(found: list[list[int]], lengths: list[int]) -> None:
    """Check that the parts of each tile follow each other and cover the text."""
    stops: dict[tuple[int, int], int] = {}
    for _, num_queries, token, sequence, _, _, first, whole, stop, end, *_ in found:
        if not num_queries:  # padding reads no keys
            assert stop <= first
            continue
        assert first == stops.get((sequence, token), 0) or first >= stop
        assert min(first, stop) <= whole <= max(first, stop)
        assert end == lengths[sequence]
        stops[sequence, token] = max(stop, stops.get((sequence, token), 0))
    assert all(stop == lengths[sequence] for (sequence, _), stop in stops.items())


SMALL = 24
"""Multiprocessors of a device for which a few sequences are as many as 64 are for an H100."""
# Keys and queries of each sequence, multiprocessors, and the shares of all programs: a text alone,
# a long text among short ones, texts of one length, few and many, a prompt among short texts.
DIVISIONS = [
    (([1024], None), 132, (64, 64, 2, 8)),
    (([131_072], None), 132, (256, 256, 64, 32)),
    (([4096, *[300] * 7], None), SMALL, (224, 136, 7, 32)),
    (([2048] * 4, None), SMALL, (184, 128, 8, 16)),
    (([1024] * 16, None), SMALL, (160, 128, 16, 1)),
    (([2048, *[1000] * 7], [64, *[1] * 7]), SMALL, (240, 120, 16, 16)),
    (([32_768, *[300] * 63], None), 132, (1432, 760, 16, 32)),
    (([8192] * 16, None), 132, (952, 768, 22, 32)),
    (([1024] * 64, None), 132, (640, 512, 16, 1)),
    (([8192, *[1000] * 63], [512, *[1] * 63]), 132, (1584, 1016, 64, 7)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("texts", "processors", "shares"), grid(DIVISIONS, DIVISIONS[:6]))
def test_long_texts_are_read_in_parts(
    texts: tuple[list[int], list[int] | None], processors: int, shares: tuple[int, ...]
) -> None:
    """Not texts of one length that occupy the device."""
    assert shares_of(*texts, processors=processors) == shares


@pytest.mark.slow
@pytest.mark.parametrize("processors", grid([SMALL, 108, 142], [SMALL]))
def test_recorded_steps_have_room_for_all_parts(processors: int) -> None:
    """Whatever their texts are, for devices of several sizes."""
    of = partial(shares_of, planned_keys=131_072, processors=processors)
    others = 63 * processors // 142
    assert of([32_768, *[300] * others]).launched == of([1024] * (1 + others)).launched
    assert of([131_072] * 4, [21] * 4).launched == of([5, 131_072, 0, 900], [21, 21, 0, 3]).launched


@pytest.mark.slow
def test_a_recorded_step_of_one_text_is_read_in_parts() -> None:
    of = partial(shares_of, planned_keys=131_072)
    assert of([131_072]).most_tiles == 64
    assert of([900]).with_work == 8 * 7
