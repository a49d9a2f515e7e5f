"""Blocks with several holders and content that outlives them, under any sequence of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.store import BlockStore, next_key, root_key

NUM_BLOCKS = 12


def keys_of(text: list[int], salt: str = "") -> list[bytes]:
    """Keys of blocks of one token each."""
    keys = [root_key(salt)]
    for token in text:
        keys.append(next_key(keys[-1], [token]))
    return keys[1:]


class StoreMachine(RuleBasedStateMachine):
    """Holders of short texts over two tokens, and what was written to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore(NUM_BLOCKS, 1)
        self.held: list[list[int]] = []
        self.content: dict[int, tuple[bytes, bool]] = {}

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=5), speculates=st.booleans())
    def run_text(self, text: list[int], speculates: bool) -> None:
        """Act like a request: take cached blocks, compute the rest, publish all."""
        keys = keys_of(text)
        blocks, num_with_draft_kv = self.store.take_cached(keys)
        for number, block in enumerate(blocks):
            key, drafted = self.content[block]
            assert key == keys[number], "a block is handed out for another text"
            assert drafted or number >= num_with_draft_kv
        if len(text) - len(blocks) > self.store.num_free:
            self.store.release(blocks)
            return
        fresh = self.store.allocate(len(text) - len(blocks), blocks[-1] if blocks else None)
        for block in fresh:
            self.content.pop(block, None)
        for number, block in enumerate(blocks + fresh):
            drafted = speculates or number < num_with_draft_kv
            self.content[block] = (keys[number], drafted)
            self.store.publish(block, keys[number], drafted)
        self.held.append(blocks + fresh)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 50))
    def release(self, index: int) -> None:
        self.store.release(self.held.pop(index % len(self.held)))

    @rule()
    def forget(self) -> None:
        self.store.forget_all()

    @invariant()
    def accounting_holds(self) -> None:
        self.store.check_invariants(block for blocks in self.held for block in blocks)
        assert self.store.num_used == len({block for blocks in self.held for block in blocks})
        assert self.store.num_free == NUM_BLOCKS - self.store.num_used


TestStore = pytest.mark.sole("random use of the block store")(StoreMachine.TestCase)
TestStore.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_longest_unused_goes_first_and_of_a_text_its_end() -> None:
    store = BlockStore(4, 1)
    old, new = keys_of([0, 1]), keys_of([1, 1])
    for keys in (old, new):
        blocks = store.allocate(2)
        for block, key in zip(blocks, keys, strict=True):
            store.publish(block, key, has_draft_kv=False)
        store.release(blocks)
    store.release(store.allocate(1))
    assert [len(store.take_cached(keys)[0]) for keys in (old, new)] == [1, 2]


def test_a_block_with_draft_kv_replaces_a_block_without() -> None:
    store = BlockStore(4, 1)
    (key,) = keys_of([1])
    plain, drafted = store.allocate(2)
    for block, has_draft_kv in ((plain, False), (drafted, True), (plain, False)):
        store.publish(block, key, has_draft_kv)
    assert store.take_cached([key]) == ([drafted], 1)


def test_cache_salts_separate_prefixes() -> None:
    assert keys_of([1, 2]) != keys_of([1, 2], "mine")


def test_disabled_prefix_cache_stores_nothing() -> None:
    store = BlockStore(4, 1, keeps_content=False)
    blocks = store.allocate(2)
    for block, key in zip(blocks, keys_of([1, 2]), strict=True):
        store.publish(block, key, has_draft_kv=True)
    assert store.take_cached(keys_of([1, 2])) == ([], 0)
