"""K/V blocks of sequences: allocation, sharing through the prefix cache, release.

Target and draft model share a table, and their storage has the same blocks. With a draft window the
draft model has a separate table and pool: a sequence holds the draft blocks of its window only,
none if it drafts nothing, and all if it must draft without the window.

Not for: when sequences take and release blocks (`scheduler.py`), or what is in them (`store.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduling.rows import PlannedRow
from engine.scheduling.sequence import Sequence
from engine.scheduling.store import BlockStore

BlockTable = tuple[int, ...]


class BlockTables:
    def __init__(self, target: BlockStore, draft: BlockStore | None = None) -> None:
        """target, draft: blocks of their K/V; draft is None if the models share blocks."""
        self.target = target
        self.draft = draft
        self._size = target.block_size

    def take_cached(self, sequence: Sequence) -> int:
        """Hold a text's cached blocks; return how many leading blocks the draft model can skip.

        It skips blocks with cached draft K/V, or before its window; none if its window
        has no cached block.
        """
        keys = sequence.block_keys(sequence.num_shared // self._size, self._size)
        blocks, num_with_draft_kv = self.target.take_cached(keys)
        sequence.block_ids = tuple(blocks)
        if self.draft is None:
            return num_with_draft_kv
        if not sequence.request.speculation.num_drafts:
            return 0
        first = self._first_in_window(sequence)
        draft_blocks, _ = self.draft.take_cached(keys[first : len(blocks)])
        if not draft_blocks:
            return 0
        sequence.draft_block_ids = (0,) * first + tuple(draft_blocks)
        sequence.first_draft_block = first
        sequence.draft_kv_first = first * self._size
        return first + len(draft_blocks)

    def publish(self, sequence: Sequence, num_target: int, draft_kv_first: int, num_draft: int) -> None:
        """Let other requests use the full blocks of a text.

        num_target: tokens with target K/V; those in [draft_kv_first, num_draft) have draft K/V.
        """
        if not sequence.shares_blocks:
            return
        # Blocks are published with draft K/V from the text's beginning on, without a gap.
        if self.draft is None and draft_kv_first:
            num_draft = 0
        num_full = num_target // self._size
        num_with_draft_kv = min(num_target, num_draft) // self._size
        num_published = sequence.num_published_blocks
        if num_full <= num_published and num_with_draft_kv <= sequence.num_blocks_with_draft_kv:
            return
        keys = sequence.block_keys(num_full, self._size)
        new_target = range(num_published, num_full)
        new_draft = range(sequence.num_blocks_with_draft_kv, num_with_draft_kv)
        if self.draft is None:
            for number in {*new_target, *new_draft}:
                has_draft_kv = number < num_with_draft_kv
                self.target.publish(sequence.block_ids[number], keys[number], has_draft_kv)
        else:
            for number in new_target:
                self.target.publish(sequence.block_ids[number], keys[number], False)
            first = max(-(-draft_kv_first // self._size), sequence.first_draft_block)
            for number in range(max(new_draft.start, first), num_with_draft_kv):
                self.draft.publish(sequence.draft_block_ids[number], keys[number], True)
        sequence.num_published_blocks = max(num_full, num_published)
        sequence.num_blocks_with_draft_kv = max(num_with_draft_kv, sequence.num_blocks_with_draft_kv)

    def try_allocate(self, row: PlannedRow) -> bool:
        """Allocate the blocks of a row; return False if too few are free.

        The draft model's blocks may then be allocated.
        """
        if self.draft is not None and not self._try_allocate_draft(row, self.draft):
            return False
        return self._extend_target(row.sequence, row.end + row.num_nodes)

    def holds_lacking_blocks(self, sequence: Sequence, row: PlannedRow) -> bool:
        """Return whether a sequence holds blocks of the pool that was short for a row."""
        if self.draft is not None:
            num_missing = -(-row.draft_kv_stop // self._size) - len(row.sequence.draft_block_ids)
            if num_missing > self.draft.num_free:
                return bool(sequence.held_draft_blocks)
        return bool(sequence.block_ids)

    def admit(self, row: PlannedRow, stop: int) -> bool:
        """Allocate a text's blocks up to index `stop`, and the draft model's of this row.

        Return False if too few are free for the whole text.
        """
        if not self.has_blocks(row.sequence, stop):
            return False
        drafts = row.sequence.request.speculation.num_drafts > 0
        if self.draft is not None and drafts and not self._try_allocate_draft(row, self.draft):
            return False
        return self._extend_target(row.sequence, stop)

    def has_blocks(self, sequence: Sequence, stop: int) -> bool:
        """Whether blocks are free for the rest of a text up to index `stop`."""
        num_blocks = -(-stop // self._size)
        if self.draft is not None and sequence.request.speculation.num_drafts:
            first = max(self._first_in_window(sequence), len(sequence.draft_block_ids))
            if num_blocks - first > self.draft.num_free:
                return False
        return num_blocks - len(sequence.block_ids) <= self.target.num_free

    def release(self, sequence: Sequence) -> None:
        self.target.release(sequence.block_ids)
        if self.draft is not None:
            self.draft.release(sequence.held_draft_blocks)
        sequence.block_ids = ()
        sequence.draft_block_ids = ()
        sequence.first_draft_block = 0

    def portion(self, number: int, count: int) -> tuple[BlockStore, BlockStore | None]:
        """Return stores of one of `count` equal portions of the blocks (`BlockStore.portion`)."""
        target = self.target.portion(number, count)
        if self.draft is None:
            return target, None
        return target, self.draft.portion(number, count)

    def blocks_of(self, sequences: list[Sequence]) -> tuple[set[int], set[int]]:
        """Return the blocks that sequences hold, of the target and of the draft model."""
        blocks = {block for sequence in sequences for block in sequence.block_ids}
        if self.draft is None:
            return blocks, blocks
        return blocks, {block for sequence in sequences for block in sequence.held_draft_blocks}

    def forget(self, blocks: Iterable[int], draft_blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Remove blocks from the prefix cache; return the blocks without holders, by model."""
        free = self.target.forget(blocks)
        if self.draft is None:
            return free, free
        return free, self.draft.forget(draft_blocks)

    def forget_all(self) -> None:
        for store in (self.target, self.draft):
            if store is not None:
                store.forget_all()

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the blocks of running sequences agree with the accounting."""
        running = list(running)
        self.target.check_invariants(block for s in running for block in s.block_ids)
        if self.draft is not None:
            self.draft.check_invariants(block for s in running for block in s.held_draft_blocks)

    def _try_allocate_draft(self, row: PlannedRow, store: BlockStore) -> bool:
        """Release draft blocks before the window, and allocate the row's draft blocks."""
        if not row.draft_kv_stop:
            return True
        sequence = row.sequence
        first = row.first_draft_key // self._size
        table = sequence.draft_block_ids
        store.release(table[sequence.first_draft_block : first])
        sequence.first_draft_block = first
        if first > len(table):
            table += (0,) * (first - len(table))
        extended = self._extended(store, table, row.draft_kv_stop)
        sequence.draft_block_ids = table if extended is None else extended
        return extended is not None

    def _extend_target(self, sequence: Sequence, stop: int) -> bool:
        """Allocate the target's blocks of a text up to index `stop`; False if too few are free."""
        extended = self._extended(self.target, sequence.block_ids, stop)
        if extended is None:
            return False
        sequence.block_ids = extended
        return True

    def _extended(self, store: BlockStore, table: BlockTable, stop: int) -> BlockTable | None:
        """Return a table with blocks up to index `stop`; None if too few blocks are free."""
        num_missing = -(-stop // self._size) - len(table)
        if num_missing <= 0:
            return table
        if num_missing > store.num_free:
            return None
        return (*table, *store.allocate(num_missing, table[-1] if table else None))

    def _first_in_window(self, sequence: Sequence) -> int:
        """Return the number of the first block of its text that the draft model will read."""
        if not sequence.draft_window:
            return 0
        return max(0, len(sequence.tokens) - sequence.draft_window) // self._size
