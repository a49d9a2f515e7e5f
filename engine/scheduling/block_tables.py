"""K/V blocks of sequences: allocation, sharing through the prefix cache, release.

Target and draft model share a table, and their storage has the same blocks. With a draft window the
draft model has a separate table and pool: a sequence holds the draft blocks of its window only,
none if it drafts nothing, and all if it must draft without the window.

A model with recurrent layers has places for states besides (`states.py`). A text starts from a
cached prefix only as far as it has states.

Not for: when sequences take and release blocks (`scheduler.py`), or what is in them (`store.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.plan import Row
from engine.scheduling.rows import PlannedRow
from engine.scheduling.sequence import Sequence
from engine.scheduling.states import SequenceStates, StateStore
from engine.scheduling.store import BlockStore

BlockTable = tuple[int, ...]


class BlockTables:
    def __init__(
        self,
        target: BlockStore,
        draft: BlockStore | None = None,
        states: StateStore | None = None,
        draft_states: StateStore | None = None,
    ) -> None:
        """target, draft: blocks of their K/V; draft is None if the models share blocks.

        states, draft_states: places of the states of models with recurrent layers.
        """
        self.target = target
        self.draft = draft
        self.states = states
        self.draft_states = draft_states
        self.state_stores = [store for store in (states, draft_states) if store is not None]
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

    def start_from_states(self, sequence: Sequence, num_with_draft_kv: int) -> int:
        """Cut a text's cached blocks to the last one with states, and take those.

        num_with_draft_kv: leading blocks that the draft model could skip; return the number that it
        can skip.
        """
        if not self.state_stores:
            return num_with_draft_kv
        keys = sequence.block_keys(len(sequence.block_ids), self._size)
        sequence.num_alike_blocks = len(keys)
        count = len(keys) if self.states is None else self.states.deepest(keys)
        num_skipped = min(num_with_draft_kv, count)
        if self.draft_states is not None and num_skipped and sequence.request.speculation.num_drafts:
            deepest = self.draft_states.deepest(keys[:num_skipped])
            # Draft K/V after the state would be computed again, into blocks that others read.
            if deepest < num_skipped:
                while deepest and not (self.states is None or keys[deepest - 1] in self.states):
                    deepest = self.draft_states.deepest(keys[: deepest - 1])
                count = num_skipped = deepest
            if num_skipped:
                self.draft_states.start(sequence.draft_states, keys[num_skipped - 1], num_skipped * self._size)
        if self.states is not None and count:
            self.states.start(sequence.states, keys[count - 1], count * self._size)
        self.target.release(sequence.block_ids[count:])
        sequence.block_ids = sequence.block_ids[:count]
        return num_with_draft_kv if self.draft is not None else num_skipped

    def keep_states(self, row: PlannedRow) -> None:
        """Choose the states that a row's passes store for later requests."""
        sequence = row.sequence
        if not self.state_stores or not sequence.shares_blocks:
            return
        draft_end = row.draft_read_end if row.num_draft_known else 0
        fixed = (sequence.num_alike_blocks, (sequence.num_prompt - 1) // self._size)
        for (store, states), end in zip(self._states_of(sequence), (row.end, draft_end), strict=True):
            if store is None:
                continue
            for count in sorted({*fixed, end // self._size}):
                tokens = count * self._size
                if states.covered < tokens <= end:
                    key = sequence.block_keys(count, self._size)[-1]
                    store.keep(states, key, tokens, count in fixed)

    def advance(self, sequence: Sequence, row: Row) -> None:
        """Note that the passes of a row have stored its states."""
        if self.states is not None:
            self.states.advance(sequence.states, row.end)
        if self.draft_states is not None and row.draft_input_ids:
            self.draft_states.advance(sequence.draft_states, row.draft_first_index + len(row.draft_input_ids))

    def _states_of(self, sequence: Sequence) -> Iterator[tuple[StateStore | None, SequenceStates]]:
        yield self.states, sequence.states
        yield self.draft_states, sequence.draft_states

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
        if not self.has_blocks(row.sequence, stop) or not all(store.has_seat for store in self.state_stores):
            return False
        drafts = row.sequence.request.speculation.num_drafts > 0
        if self.draft is not None and drafts and not self._try_allocate_draft(row, self.draft):
            return False
        for store, states in self._states_of(row.sequence):
            if store is not None:
                store.sit(states)
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
        for store, states in self._states_of(sequence):
            if store is not None:
                store.leave(states)
        sequence.states = SequenceStates()
        sequence.draft_states = SequenceStates()

    def portion(self, number: int, count: int) -> BlockTables:
        """Return tables of one of `count` equal portions of the blocks (`BlockStore.portion`)."""
        return BlockTables(
            self.target.portion(number, count),
            self.draft and self.draft.portion(number, count),
            self.states and self.states.portion(number, count),
            self.draft_states and self.draft_states.portion(number, count),
        )

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

    def forget_states(self, sequence: Sequence) -> None:
        """Remove the states of a text from the prefix cache."""
        keys = sequence.block_keys(len(sequence.tokens) // self._size, self._size)
        for store in self.state_stores:
            store.forget(keys)

    def forget_all(self) -> None:
        for store in (self.target, self.draft, self.states, self.draft_states):
            if store is not None:
                store.forget_all()

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the blocks of running sequences agree with the accounting."""
        running = list(running)
        self.target.check_invariants(block for s in running for block in s.block_ids)
        if self.draft is not None:
            self.draft.check_invariants(block for s in running for block in s.held_draft_blocks)
        if self.states is not None:
            self.states.check_invariants(s.states for s in running)
        if self.draft_states is not None:
            self.draft_states.check_invariants(s.draft_states for s in running)

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
