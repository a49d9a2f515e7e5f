"""Moves accepted drafts' K/V to their slots: a launch per tensor for all layers.

Torch gathers all rows into new memory and scatters them from there. Here a program holds a piece of
a sequence's rows in registers: it reads all of them before it writes any.

Runs compiled on CUDA, and on a CPU in Triton's interpreter (tests).
"""

# A kernel's arguments are pointers and numbers that Triton sees only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Numbers that a program holds."""


@triton.jit
def _keep(storage, moves, layer_stride, width, most: tl.constexpr, columns: tl.constexpr):
    layer, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, most)
    pair = moves + (sequence * most + place) * 2
    source, destination = tl.load(pair)[:, None], tl.load(pair + 1)[:, None]
    column = (tl.program_id(2) * columns + tl.arange(0, columns))[None, :]
    moved = (source >= 0) & (column < width)
    rows = storage + layer * layer_stride + column
    value = tl.load(rows + source * width, mask=moved)
    # Other threads may still read the slots that this one writes.
    tl.debug_barrier()
    tl.store(rows + destination * width, value, mask=moved)


def keep(storage: Tensor, move_SM2: Tensor) -> None:
    """Move rows of [layers, slots, heads, dim]; a sequence's rows are read before any write.

    move_SM2: int64, (from, to) by sequence, M a power of two; -1 pads. Sequences share no slots.
    """
    num_layers, num_slots, *row = storage.shape
    num_sequences, most, _ = move_SM2.shape
    width = row[0] * row[1]
    columns = min(triton.next_power_of_2(width), max(16, _TILE // most))
    grid = (num_layers, num_sequences, triton.cdiv(width, columns))
    _keep[grid](storage, move_SM2, num_slots * width, width, most=most, columns=columns)
