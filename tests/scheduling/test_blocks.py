"""The block pool under any sequence of operations, and the K/V move."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.attention.tensors import KVShape, KVTensors
from engine.scheduling.store import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Owners take and return blocks; no block is ever held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(24)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.held.append(self.pool.allocate(count))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 50), count=st.integers(0, 4))
    def grow(self, index: int, count: int) -> None:
        blocks_held = self.held[index % len(self.held)]
        if blocks_held and count <= self.pool.num_free:
            behind = blocks_held[-1] + 1
            is_free = behind < 24 and not any(behind in blocks for blocks in self.held)
            taken = self.pool.allocate(count, after=blocks_held[-1])
            if count and is_free:
                assert taken[0] == behind, "the block behind was free and was not used"
            blocks_held += taken

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 50))
    def give_back(self, index: int) -> None:
        self.pool.release(self.held.pop(index % len(self.held)))

    @invariant()
    def blocks_are_held_once(self) -> None:
        self.pool.check_invariants()
        everything = [block for blocks in self.held for block in blocks]
        assert len(everything) == len(set(everything)) == 24 - self.pool.num_free


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_fresh_sequences_are_contiguous_and_have_room_to_grow() -> None:
    pool = BlockPool(64)
    first = pool.allocate(4)
    second = pool.allocate(4)
    assert first == list(range(first[0], first[0] + 4))
    assert second == list(range(second[0], second[0] + 4))
    assert pool.allocate(3, after=first[-1]) == [first[-1] + 1, first[-1] + 2, first[-1] + 3]


def test_a_block_cannot_be_given_back_twice() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_moves_read_everything_before_they_write() -> None:
    storage = KVTensors(KVShape.equal(2, 1, 3, 2), 8, torch.float32, torch.device("cpu"))
    storage.keys[:] = torch.arange(8.0).reshape(1, 8, 1, 1)
    storage.values[:] = -torch.arange(8.0).reshape(1, 8, 1, 1)
    storage.keep([[(5, 3), (3, 4)], [(7, 6)]])
    expected = np.array([0, 1, 2, 5, 3, 5, 7, 7.0])
    assert (storage.keys[1, :, 0, 0].numpy() == expected).all()
    assert (storage.values[0, :, 0, 1].numpy() == -expected).all()
    storage.keep([[]])
    storage.keep([])
    assert (storage.keys[1, :, 0, 0].numpy() == expected).all()
