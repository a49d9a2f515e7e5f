"""Free blocks of the K/V pool.

Blocks are allocated in runs that are as contiguous as possible, because a sequence with contiguous blocks is read
without a copy. Not for: contents or owners of blocks (sequences hold their block ids).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class BlockPool:
    """Which blocks have no holder."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = self.num_free = num_blocks
        self._is_free = np.ones(num_blocks, dtype=bool)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, continuing after block `after` if the blocks there are free.

        The caller checks `num_free` first; it is an internal error to take more.
        """
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = [] if after is None else self._take(after + 1, count)
        while len(taken) < count:
            taken += self._take(self._begin_in_largest(count - len(taken)), count - len(taken))
        self.num_free -= count
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        """Return blocks to the pool."""
        for block in block_ids:
            assert 0 <= block < self.num_blocks, block
            assert not self._is_free[block], f"block {block} is already free"
            self._is_free[block] = True
        self.num_free += len(block_ids)

    def check_invariants(self) -> None:
        """Raise AssertionError if the count of free blocks is wrong."""
        assert self._is_free.sum() == self.num_free

    def _take(self, begin: int, count: int) -> list[int]:
        """Take up to `count` blocks, those that are free from `begin` on without a gap."""
        wanted = self._is_free[begin : begin + count]
        end = begin + (len(wanted) if wanted.all() else int(wanted.argmin()))
        self._is_free[begin:end] = False
        return list(range(begin, end))

    def _begin_in_largest(self, count: int) -> int:
        """Return where to take blocks of the largest free run: in its middle, so that the sequence before it has room
        to grow.
        """
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, sizes = edges[::2], edges[1::2] - edges[::2]
        largest = int(sizes.argmax())
        start = int(starts[largest])
        return start + max(0, int(sizes[largest]) - count) // 2 if start else 0
