"""The flat batch of a forward pass, made from the sequences that take part in it.

A pass has T tokens of B sequences. A sequence puts in its input tokens, then its drafted nodes. An input token sees
everything before it and itself; a node sees all input tokens, its own ancestors and itself. The nodes' K/V lies in the
slots behind the last input token, in node order; the position of a node is that of the root plus its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NodeInput:
    """Drafted nodes of one sequence that enter a pass, and those already in the cache."""

    tokens: Sequence[int]
    """Empty where the tokens are on the device only."""
    depths: Sequence[int]
    """Depth of each entering node; the first drafted level has depth 1."""
    cached_depths: Sequence[int]
    """Depth of the nodes whose K/V earlier passes of this step wrote."""
    ancestry: Bools
    """[entering, cached + entering]: which nodes each entering node may see."""

    @cached_property
    def all_seen(self) -> bool:
        """Whether each entering node sees every node."""
        return bool(self.ancestry.all())


NO_NODES = NodeInput((), (), (), np.zeros((0, 0), dtype=np.bool_))


@dataclass(frozen=True)
class SequenceInput:
    """One sequence's part of a pass."""

    input_ids: Sequence[int]
    first_index: int
    """Index of the first input token; with no input tokens, the index of the first node."""
    block_ids: Sequence[int]
    nodes: NodeInput
    wanted: slice
    """Which of the part's tokens need logits, counted within the part."""
    first_key: int = 0
    """Index of the first token that is seen at all."""


@dataclass(frozen=True)
class PassInput:
    """A flat batch of T tokens of B sequences, on the host.

    A sequence's keys are numbered like its tokens: the text up to `end_B`, then the nodes behind it.
    """

    sequences: Sequence[SequenceInput]
    token_ids_T: Ints
    """0 where the tokens are on the device only."""
    drawn_M: Ints
    """Rows of the batch whose tokens are on the device only, in order."""
    positions_T: Ints
    slots_T: Ints
    """Where the K/V of the pass's own tokens is written."""
    wanted_N: Ints
    """Rows of the batch whose logits are returned, in order."""
    start_B: Ints
    """First row of each sequence."""
    num_inputs_B: Ints
    num_rows_B: Ints
    first_key_B: Ints
    end_B: Ints
    """Index after the last input token."""
    num_keys_B: Ints
    """Index after the last key."""
    blocks_BP: Ints
    """Block ids, padded with 0."""

    def part(self, begin: int, end: int) -> PassInput:
        """The batch of the sequences of these numbers alone."""
        sequences = slice(begin, end)
        first = int(self.start_B[begin])
        tokens = slice(first, int(self.start_B[end - 1] + self.num_rows_B[end - 1]))
        wanted = slice(*np.searchsorted(self.wanted_N, (tokens.start, tokens.stop)).tolist())
        drawn = slice(*np.searchsorted(self.drawn_M, (tokens.start, tokens.stop)).tolist())
        return PassInput(
            sequences=self.sequences[sequences],
            token_ids_T=self.token_ids_T[tokens],
            drawn_M=self.drawn_M[drawn] - first,
            positions_T=self.positions_T[tokens],
            slots_T=self.slots_T[tokens],
            wanted_N=self.wanted_N[wanted] - first,
            start_B=self.start_B[sequences] - first,
            num_inputs_B=self.num_inputs_B[sequences],
            num_rows_B=self.num_rows_B[sequences],
            first_key_B=self.first_key_B[sequences],
            end_B=self.end_B[sequences],
            num_keys_B=self.num_keys_B[sequences],
            blocks_BP=self.blocks_BP[sequences],
        )


def build_all(passes: Sequence[Sequence[SequenceInput]], block_size: int) -> list[PassInput]:
    """The batches of several passes, laid out together."""
    whole = build([sequence for one in passes for sequence in one], block_size)
    ends = np.cumsum([len(one) for one in passes]).tolist()
    return [whole.part(end - len(one), end) for one, end in zip(passes, ends, strict=True)]


def build(sequences: Sequence[SequenceInput], block_size: int) -> PassInput:
    """Concatenate the parts of all sequences."""
    sizes = [(s.first_index, len(s.input_ids), len(s.nodes.cached_depths), len(s.nodes.depths)) for s in sequences]
    first_B, num_inputs_B, num_cached_B, num_entering_B = np.array(sizes, dtype=np.int64).T
    num_rows_B = num_inputs_B + num_entering_B
    start_B = np.cumsum(num_rows_B) - num_rows_B
    end_B = first_B + num_inputs_B
    row_T = np.repeat(np.arange(len(sequences)), num_rows_B)
    place_T = np.arange(len(row_T)) - start_B[row_T]
    is_node_T = place_T >= num_inputs_B[row_T]
    token_ids_T, drawn_M = _tokens(sequences, is_node_T, row_T)
    # Entering nodes lie behind those that are cached.
    index_T = first_B[row_T] + place_T + is_node_T * num_cached_B[row_T]
    blocks_BP = _table([s.block_ids for s in sequences])
    return PassInput(
        sequences=sequences,
        token_ids_T=token_ids_T,
        drawn_M=drawn_M,
        positions_T=_positions(sequences, index_T, is_node_T, end_B[row_T]),
        slots_T=blocks_BP[row_T, index_T // block_size] * block_size + index_T % block_size,
        wanted_N=np.concatenate(
            [
                np.arange(start, start + count, dtype=np.int64)[s.wanted]
                for s, start, count in zip(sequences, start_B.tolist(), num_rows_B.tolist(), strict=True)
            ]
        ),
        start_B=start_B,
        num_inputs_B=num_inputs_B,
        num_rows_B=num_rows_B,
        first_key_B=np.array([s.first_key for s in sequences], dtype=np.int64),
        end_B=end_B,
        num_keys_B=end_B + num_cached_B + num_entering_B,
        blocks_BP=blocks_BP,
    )


def _tokens(sequences: Sequence[SequenceInput], is_node_T: Bools, row_T: Ints) -> tuple[Ints, Ints]:
    """(token ids, 0 where the device alone knows them; the rows where it does)."""
    known = [token for s in sequences for part in (s.input_ids, s.nodes.tokens) for token in part]
    if len(known) == len(row_T):
        return np.array(known, dtype=np.int64), np.zeros(0, dtype=np.int64)
    is_drawn_B = np.array([len(s.nodes.tokens) < len(s.nodes.depths) for s in sequences])
    is_drawn_T = is_node_T & is_drawn_B[row_T]
    token_ids_T = np.zeros(len(row_T), dtype=np.int64)
    token_ids_T[~is_drawn_T] = known
    return token_ids_T, np.flatnonzero(is_drawn_T)


def _positions(sequences: Sequence[SequenceInput], index_T: Ints, is_node_T: Bools, end_T: Ints) -> Ints:
    """An input token's position is its index, a node's that of the root plus its depth."""
    depths = [depth for s in sequences for depth in s.nodes.depths]
    if not depths:
        return index_T
    positions_T = index_T.copy()
    positions_T[is_node_T] = end_T[is_node_T] - 1 + np.array(depths, dtype=np.int64)
    return positions_T


def _table(block_ids: Sequence[Sequence[int]]) -> Ints:
    """[B, P] block ids, padded with 0."""
    if len(block_ids) == 1:
        return np.array(block_ids, dtype=np.int64)
    table = np.zeros((len(block_ids), max(map(len, block_ids))), dtype=np.int64)
    for row, ids in zip(table, block_ids, strict=True):
        row[: len(ids)] = ids
    return table
