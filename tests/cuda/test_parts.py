"""Programs of the Triton attention kernel: which part of which tile of a sequence each one computes."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

attention_kernel = pytest.importorskip("engine.cuda.attention_kernel")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from tests.engine import tiny  # noqa: E402


@triton.jit
def _shares(
    shares, counts, first_keys, num_keys, num_sequences, padded_queries, most_parts, most_added, least_keys,
    tile_queries: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    """Write the share of each program [G, 5]."""
    program = tl.program_id(0)
    sequence, tile, part, num_parts, part_keys = attention_kernel._share_of(
        program, counts, first_keys, num_keys, num_sequences, padded_queries, most_parts, most_added, least_keys,
        tile_queries, tile_keys,
    )  # fmt: skip
    tl.store(shares + program * 5, sequence)
    tl.store(shares + program * 5 + 1, tile)
    tl.store(shares + program * 5 + 2, part)
    tl.store(shares + program * 5 + 3, num_parts)
    tl.store(shares + program * 5 + 4, part_keys)


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
    """Find the work of all programs of a pass as a device does, and check that each part of each tile has one.

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
    table = torch.full((launched, 5), -1, dtype=torch.int32, device=tiny.DEVICE)
    of = [torch.tensor(some, dtype=torch.int32, device=tiny.DEVICE) for some in (counts, [0] * len(counts), lengths)]
    sizes = len(counts), padded, most_parts, most_added, attention_kernel._PART_KEYS
    _shares[(launched,)](table, *of, *sizes, tile_queries=tile_queries, tile_keys=tile_keys)
    found = [row for row in table.tolist() if row[0] < len(counts)]
    parts = {sequence: num_parts for sequence, _, _, num_parts, _ in found}
    expected = [
        (sequence, tile, part)
        for sequence, count in enumerate(counts)
        for tile in range(-(-max(count, padded) // tile_queries))
        for part in range(parts[sequence])
    ]
    assert [tuple(row[:3]) for row in found] == expected
    least = max(part_keys for *_, part_keys in found)
    most_tiles = max(
        min(tiles, max(least // tile_keys, math.ceil(tiles / parts[sequence])))
        for sequence, tiles in enumerate(math.ceil(length / tile_keys) for length in lengths)
    )
    return Shares(launched * num_heads, len(found) * num_heads, most_tiles, most_parts)


def test_long_texts_are_read_in_parts() -> None:
    """Also one long text among many short ones; but not texts of one length that occupy the device."""
    assert shares_of([1024]) == (64, 64, 2, 8)
    assert shares_of([131_072]) == (256, 256, 64, 32)
    assert shares_of([32_768, *[300] * 63]) == (1432, 760, 16, 32)
    assert shares_of([8192] * 16) == (952, 768, 22, 32)
    assert shares_of([1024] * 64) == (640, 512, 16, 1)
    assert shares_of([8192, *[1000] * 63], [512, *[1] * 63]) == (1584, 1016, 64, 7)


@pytest.mark.parametrize("processors", [108, 142])
def test_recorded_steps_have_room_for_all_parts(processors: int) -> None:
    """Whatever their texts are, for devices of several sizes."""
    of = partial(shares_of, planned_keys=131_072, processors=processors)
    assert of([32_768, *[300] * 63]).launched == of([1024] * 64).launched
    assert of([131_072] * 4, [21] * 4).launched == of([5, 131_072, 0, 900], [21, 21, 0, 3]).launched
    assert of([131_072]).most_tiles == 64
    assert of([900]).with_work == 8 * 7
