"""Which blocks hold the K/V of which text, so that a later request with the same beginning need not compute it.

A block that is full of known tokens is *published* under a key that names these tokens and all before them. Holders of
a block are counted; a published block without holders keeps its content until its memory is needed, the longest unused
first. The target's and the draft model's storage have the same blocks, and a block may hold the K/V of the target
alone, where the request that computed it did not speculate: the draft model then computes its own into the same block.
Pure Python.

Not for: what a sequence does with its blocks (`scheduling`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine.scheduling.blocks import BlockPool

Key = bytes


def root_key(salt: str) -> Key:
    """What the first block's key is made of; requests of different salts share nothing."""
    return blake2b(salt.encode(), digest_size=16).digest()


def next_key(before: Key, tokens: Sequence[int]) -> Key:
    """Key of a block of `tokens` behind the block of key `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockStore:
    """A block pool whose blocks may have several holders, and outlive them.

    keeps_content: False publishes nothing, so that nothing is shared.
    """

    def __init__(self, num_blocks: int, block_size: int, keeps_content: bool = True) -> None:
        self.block_size = block_size
        self.keeps_content = keeps_content
        self._pool = BlockPool(num_blocks)
        self._num_holders: dict[int, int] = {}
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._drafted: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, with content or without."""
        return self._pool.num_free + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return len(self._num_holders)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks of no content, continuing behind block `after` where that is free."""
        while self._pool.num_free < count:
            self._forget(next(iter(self._idle)))
        blocks = self._pool.allocate(count, after)
        self._num_holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def take_known(self, keys: Sequence[Key]) -> tuple[list[int], int]:
        """Hold the blocks of the longest known beginning of `keys`; and how many of them the draft model has, too."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._num_holders[block] = self._num_holders.get(block, 0) + 1
            blocks.append(block)
        num_drafted = next((i for i, block in enumerate(blocks) if block not in self._drafted), len(blocks))
        return blocks, num_drafted

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up a sequence's hold of its blocks; the last of them are the first to be used for something else."""
        for block in reversed(block_ids):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            del self._num_holders[block]
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._pool.release([block])

    def publish(self, block: int, key: Key, drafted: bool) -> None:
        """Say what a held block holds: the target's K/V, and the draft model's when `drafted`."""
        if not self.keeps_content:
            return
        known = self._block_of.get(key)
        if known is not None and known != block:
            if not drafted or known in self._drafted:
                return
            # Another block of the same text, with more in it: it takes the place of the first.
            self._forget(known)
        self._block_of[key] = block
        self._key_of[block] = key
        if drafted:
            self._drafted.add(block)

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Take blocks out of the prefix cache; their holders keep them. Returns those that nobody holds."""
        blocks = list(block_ids)
        for block in blocks:
            if block in self._key_of:
                self._forget(block)
        return [block for block in blocks if block not in self._num_holders]

    def forget_all(self) -> None:
        """Forget what the blocks hold; their holders keep them."""
        self.forget(list(self._key_of))

    def check_invariants(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless `held`, each block once per holder, agrees with the accounting."""
        self._pool.check_invariants()
        counts: dict[int, int] = {}
        for block in held:
            counts[block] = counts.get(block, 0) + 1
        assert counts == self._num_holders, "a block is lost, or has holders nobody knows of"
        assert not counts.keys() & self._idle.keys(), "a held block counts as free"
        assert self._pool.num_used == len(counts) + len(self._idle)
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        assert self._key_of.keys() >= self._idle.keys() | self._drafted, "a block without content is kept"

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        self._drafted.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._pool.release([block])
