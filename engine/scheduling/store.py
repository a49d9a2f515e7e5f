"""Prefix cache: which blocks hold the K/V of which text, for later requests that begin alike.

A block that is full of known tokens is *published* under a key of these tokens and all tokens
before them. Holders of a block are counted. A published block without holders keeps its content
until its memory is needed; the least recently used block goes first. If target and draft model have
the same blocks, a block may hold the target's K/V alone, because the request that computed it did
not speculate; the draft model then computes its K/V into the same block. No torch.

Not for: which blocks a sequence takes, publishes and releases (`block_tables.py`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

Key = bytes


def root_key(salt: str) -> Key:
    """Return the seed of the first block's key; requests with different salts share nothing."""
    return blake2b(salt.encode(), digest_size=16).digest()


def next_key(before: Key, tokens: Sequence[int]) -> Key:
    """Return the key of a block of `tokens` after the block with key `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Free blocks, allocated in contiguous runs, because such sequences are read without a copy."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._is_free = np.ones(num_blocks, dtype=bool)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks, continuing after block `after` if the blocks there are free.

        The caller checks `num_free` first; it is an internal error to take more.
        """
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = [] if after is None else self._take(after + 1, count)
        while len(taken) < count:
            num_missing = count - len(taken)
            taken += self._take(self._begin_in_largest(num_missing), num_missing)
        self.num_free -= count
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert 0 <= block < self.num_blocks, block
            assert not self._is_free[block], f"block {block} is already free"
            self._is_free[block] = True
        self.num_free += len(block_ids)

    def check_invariants(self) -> None:
        assert self._is_free.sum() == self.num_free

    def _take(self, begin: int, count: int) -> list[int]:
        """Take up to `count` blocks from `begin` on, until the first block that is not free."""
        is_free = self._is_free[begin : begin + count]
        num_taken = len(is_free) if is_free.all() else int(is_free.argmin())
        end = begin + num_taken
        self._is_free[begin:end] = False
        return list(range(begin, end))

    def _begin_in_largest(self, count: int) -> int:
        """Return the middle of the largest free run, so that the sequence before can grow."""
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts = edges[::2]
        sizes = edges[1::2] - starts
        largest = int(sizes.argmax())
        start = int(starts[largest])
        if not start:
            return 0
        return start + max(0, int(sizes[largest]) - count) // 2


class BlockStore:
    """Block pool whose blocks may have several holders, and stay after them.

    keeps_content: False publishes nothing, so that nothing is shared.
    """

    def __init__(self, num_blocks: int, block_size: int, keeps_content: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keeps_content = keeps_content
        self._pool = BlockPool(num_blocks)
        self._num_holders: dict[int, int] = {}
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._with_draft_kv: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    def portion(self, number: int = 0, count: int = 1) -> BlockStore:
        """Return a store with a portion of the blocks for measurements; it publishes nothing."""
        size = self.num_blocks // count
        return self.with_blocks([block for block in range(self.num_blocks) if block // size == number])

    def with_blocks(self, block_ids: Sequence[int]) -> BlockStore:
        """Return a store with these blocks for measurements; it publishes nothing."""
        store = BlockStore(self.num_blocks, self.block_size, keeps_content=False)
        store.allocate(self.num_blocks)
        store.release(block_ids)
        return store

    @property
    def num_free(self) -> int:
        return self._pool.num_free + len(self._idle)

    @property
    def num_empty(self) -> int:
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        return len(self._num_holders)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks without content, continuing after block `after` if possible."""
        while self._pool.num_free < count:
            self._forget(next(iter(self._idle)))
        blocks = self._pool.allocate(count, after)
        self._num_holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def take_cached(self, keys: Sequence[Key]) -> tuple[list[int], int]:
        """Hold the longest cached prefix; return (blocks, leading blocks with draft K/V)."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._num_holders[block] = self._num_holders.get(block, 0) + 1
            blocks.append(block)
        num_with_draft_kv = 0
        for block in blocks:
            if block not in self._with_draft_kv:
                break
            num_with_draft_kv += 1
        return blocks, num_with_draft_kv

    def release(self, block_ids: Sequence[int]) -> None:
        """Release a sequence's blocks; the last blocks are reused first."""
        for block in reversed(block_ids):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            del self._num_holders[block]
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._pool.release([block])

    def publish(self, block: int, key: Key, has_draft_kv: bool) -> None:
        """Declare the content of a held block: the target's K/V, and perhaps the draft model's."""
        if not self.keeps_content:
            return
        assert block in self._num_holders, "a block without a holder may get other content"
        known = self._block_of.get(key)
        if known is not None and known != block:
            if not has_draft_kv or known in self._with_draft_kv:
                return
            # This block of the same text has more content and replaces the known block.
            self._forget(known)
        self._block_of[key] = block
        self._key_of[block] = key
        if has_draft_kv:
            self._with_draft_kv.add(block)

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Remove blocks from the prefix cache; holders keep them. Return blocks without holders."""
        blocks = list(block_ids)
        for block in blocks:
            if block in self._key_of:
                self._forget(block)
        return [block for block in blocks if block not in self._num_holders]

    def forget_all(self) -> None:
        self.forget(list(self._key_of))

    def check_invariants(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless `held`, each block once per holder, fits the accounting."""
        self._pool.check_invariants()
        counts: dict[int, int] = {}
        for block in held:
            counts[block] = counts.get(block, 0) + 1
        assert counts == self._num_holders, "a block is lost, or has unknown holders"
        assert not counts.keys() & self._idle.keys(), "a held block counts as free"
        assert self._pool.num_free == self.num_blocks - len(counts) - len(self._idle)
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        with_content = self._idle.keys() | self._with_draft_kv
        assert self._key_of.keys() >= with_content, "a block without content is not free"

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        self._with_draft_kv.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._pool.release([block])
