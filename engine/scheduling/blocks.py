"""Free blocks of the K/V pool.

Blocks are allocated in runs that are as contiguous as possible, because a sequence with contiguous blocks is read
without a copy. Pure Python.

Not for: contents or owners of blocks (sequences hold their block ids).
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Free blocks as half-open runs [start, stop)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._stop_of: dict[int, int] = {0: num_blocks}
        self._start_of: dict[int, int] = {num_blocks: 0}
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Return the number of blocks without a holder."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Return the number of blocks with a holder."""
        return self.num_blocks - self._num_free

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, continuing after block `after` if the blocks there are free.

        The caller checks `num_free` first; it is an internal error to take more.
        """
        assert 0 <= count <= self._num_free, f"{count} blocks wanted, {self._num_free} free"
        taken: list[int] = []
        if count and after is not None and after + 1 in self._stop_of:
            taken += self._take(after + 1, after + 1, count)
        while len(taken) < count:
            taken += self._take_from_largest(count - len(taken))
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Return blocks to the pool."""
        for block in block_ids:
            self._release_one(block)

    def check_invariants(self) -> None:
        """Raise AssertionError if the runs contradict each other."""
        runs = sorted(self._stop_of.items())
        assert {stop: start for start, stop in runs} == self._start_of
        assert sum(stop - start for start, stop in runs) == self._num_free
        previous_stop = -1
        for start, stop in runs:
            assert 0 <= start < stop <= self.num_blocks, (start, stop)
            assert start > previous_stop, "runs overlap, or touch without being joined"
            previous_stop = stop

    def _take_from_largest(self, count: int) -> list[int]:
        start, stop = max(self._stop_of.items(), key=lambda run: run[1] - run[0])
        # Start in the middle, so that the sequence before this run has room to grow.
        spare = max(0, (stop - start) - count)
        begin = start if start == 0 else start + spare // 2
        return self._take(start, begin, count)

    def _take(self, start: int, begin: int, count: int) -> list[int]:
        """Take up to `count` blocks at `begin` from the run that starts at `start`."""
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        end = min(stop, begin + count)
        if start < begin:
            self._add_run(start, begin)
        if end < stop:
            self._add_run(end, stop)
        self._num_free -= end - begin
        return list(range(begin, end))

    def _release_one(self, block: int) -> None:
        assert 0 <= block < self.num_blocks, block
        start, stop = block, block + 1
        assert block not in self._stop_of, f"block {block} is already free"
        if block in self._start_of:
            start = self._start_of.pop(block)
            del self._stop_of[start]
        if block + 1 in self._stop_of:
            stop = self._stop_of.pop(block + 1)
            del self._start_of[stop]
        self._add_run(start, stop)
        self._num_free += 1

    def _add_run(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
