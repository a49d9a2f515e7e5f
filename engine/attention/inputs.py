"""Layouts of a step's passes: tokens, slots of their K/V, and the keys that each token sees.

A pass is a flat batch of T tokens of B sequences. A sequence contributes its input tokens, then its
drafted nodes. An input token sees everything before it and itself. A node sees all input tokens,
its own ancestors and itself. K/V of nodes lies in the slots after the last input token, in node
order. The position of a node is the root's position plus its depth. These rules are in `place`, and
every pass follows them.

A sequence's keys are numbered like its tokens: the text up to its *end*, then the nodes. The index
of a token is its *offset* plus the end: the root has offset -1, nodes have 0 and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.plan import StatePlaces

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer[Any]]

WORD = 64


class Places(NamedTuple):
    """Places of tokens in their sequences."""

    indices: Ints
    """Indices of the tokens in their text."""
    positions: Ints
    limits: Ints
    """Index below which a token sees all keys."""


def place(end: Ints, offset: Ints, depth: Ints) -> Places:
    """Return the places of tokens.

    end: index after the last input token of the token's sequence; offset: the token's index minus
    `end`; depth: depth of a node, and offset + 1 for a token of the text.
    """
    index = end + offset
    return Places(index, end - 1 + depth, np.minimum(index + 1, end))


def slots_of(pages: Integers, row: Ints, index: Ints, block_size: int) -> Ints:
    """Return slots of tokens in the K/V pool.

    pages: block ids [B, P]; row, index: of the tokens.
    """
    block_ids: Ints = pages[row, index // block_size].astype(np.int64)
    return block_ids * block_size + index % block_size


def words_of(masks: Sequence[Bools], first_rows: Sequence[int], num_rows: int) -> Ints:
    """Return 64-bit words [rows, W] with a bit for each node that a row sees.

    masks: each [queries, nodes], for the rows from its first row on; other rows see no node.
    """
    num_words = max([1, *(-(-mask.shape[1] // WORD) for mask in masks)])
    bits = np.zeros((num_rows, num_words * WORD), dtype=np.bool_)
    for mask, first in zip(masks, first_rows, strict=True):
        bits[first : first + mask.shape[0], : mask.shape[1]] = mask
    return np.packbits(bits, axis=1, bitorder="little").view(np.int64)


@dataclass(frozen=True)
class NodeInput:
    """Drafted nodes of a sequence that enter a pass, and its nodes in the cache."""

    tokens: Sequence[int]
    """Empty if the tokens are on the device only."""
    depths: Sequence[int]
    """Depth of each entering node, from 1."""
    cached_depths: Sequence[int]
    """Depths of nodes whose K/V earlier passes of this step wrote."""
    ancestry: Bools
    """[entering, cached + entering] Nodes that each entering node sees."""


NO_NODES = NodeInput((), (), (), np.zeros((0, 0), dtype=np.bool_))


@dataclass(frozen=True)
class SequenceInput:
    """One sequence's part of a pass."""

    input_ids: Sequence[int]
    first_index: int
    """Index of the first input token, or else of the first node."""
    block_ids: Sequence[int]
    nodes: NodeInput
    wanted: slice
    """Tokens of the part that need logits, counted within the part."""
    first_key: int = 0
    state: StatePlaces | None = None
    """Places of its states in recurrent layers; None for a seat by its number in the pass."""


@dataclass(frozen=True)
class StepLayout:
    """One pass, or several consecutive passes, on the host: T tokens of B sequences.

    Arrays without a shape in their name are operands of kernels: 32-bit integers unless said.
    """

    sequences: Sequence[SequenceInput]
    token_ids_T: Ints
    """0 if the token is on the device only."""
    drawn_M: Ints
    """Rows whose tokens are on the device only."""
    positions_T: Ints
    slots_T: Ints
    """Slots to which the pass writes its K/V."""
    wanted_N: Ints
    """Rows whose logits are returned."""
    num_inputs_B: Ints
    starts: Integers
    """[B]"""
    counts: Integers
    """[B]"""
    first_keys: Integers
    """[B]"""
    ends: Integers
    """[B] Index after the last input token; later keys are nodes."""
    num_keys: Integers
    """[B] Index after the last key."""
    pages: Integers
    """[B, P] Block ids, padded with 0."""
    node_positions: Integers
    """[B, N]"""
    limits: Integers
    """[T] Index below which a token sees all keys."""
    words: Ints
    """[T, W] 64-bit words of the nodes that a token sees."""

    @property
    def seen(self) -> tuple[Integers, ...]:
        """Return the arrays that define which keys each token sees, for `model_pass.run`."""
        return (
            self.words,
            self.pages,
            self.first_keys,
            self.ends,
            self.num_keys,
            self.node_positions,
            self.limits,
        )

    @property
    def positions(self) -> Integers:
        return self.positions_T.astype(np.int32)

    def part(self, begin: int, end: int) -> StepLayout:
        sequences = slice(begin, end)
        first = int(self.starts[begin])
        stop = int(self.starts[end - 1] + self.counts[end - 1])
        cut: dict[str, Any] = {}
        for name in _SEQUENCE_FIELDS:
            cut[name] = getattr(self, name)[sequences]
        for name in _TOKEN_FIELDS:
            cut[name] = getattr(self, name)[first:stop]
        cut["starts"] = cut["starts"] - np.int32(first)
        for name in _ROW_NUMBER_FIELDS:
            rows = getattr(self, name)
            begin_row, end_row = np.searchsorted(rows, (first, stop)).tolist()
            cut[name] = rows[begin_row:end_row] - first
        return StepLayout(**cut)


_TOKEN_FIELDS = ("token_ids_T", "positions_T", "slots_T", "limits", "words")
_SEQUENCE_FIELDS = tuple("sequences num_inputs_B starts counts first_keys ends num_keys pages node_positions".split())
_ROW_NUMBER_FIELDS = ("drawn_M", "wanted_N")


def build_all(passes: Sequence[Sequence[SequenceInput]], block_size: int) -> list[StepLayout]:
    """Return the layouts of several passes, which are made together."""
    whole = build([sequence for inputs in passes for sequence in inputs], block_size)
    ends = np.cumsum([len(inputs) for inputs in passes]).tolist()
    return [whole.part(end - len(inputs), end) for inputs, end in zip(passes, ends, strict=True)]


def build(sequences: Sequence[SequenceInput], block_size: int) -> StepLayout:
    """Lay out the parts of all sequences one after the other."""
    sizes = [(s.first_index, len(s.input_ids), len(s.nodes.cached_depths), len(s.nodes.depths)) for s in sequences]
    first_B, num_inputs_B, num_cached_B, num_entering_B = np.array(sizes, dtype=np.int64).T
    num_rows_B = num_inputs_B + num_entering_B
    num_nodes_B = num_cached_B + num_entering_B
    start_B = np.cumsum(num_rows_B) - num_rows_B
    end_B = first_B + num_inputs_B
    first_node_B = start_B + num_inputs_B
    row_T = np.repeat(np.arange(len(sequences)), num_rows_B)
    offset_T = np.arange(len(row_T)) - first_node_B[row_T]
    depth_T = offset_T + 1
    is_node_T = offset_T >= 0
    words = np.zeros((len(row_T), 1), dtype=np.int64)
    node_positions = np.zeros((len(sequences), 1), dtype=np.int64)
    if is_node_T.any():
        nodes = [s.nodes for s in sequences]
        offset_T += is_node_T * num_cached_B[row_T]  # cached nodes come first
        depth_T[is_node_T] = [depth for entering in nodes for depth in entering.depths]
        masks = [entering.ancestry for entering in nodes]
        words = words_of(masks, first_node_B.tolist(), len(row_T))
        node_positions = _node_positions(nodes, end_B, num_nodes_B)
    places = place(end_B[row_T], offset_T, depth_T)
    pages = _table([s.block_ids for s in sequences])
    token_ids_T, drawn_M = _tokens(sequences, is_node_T, row_T)
    wanted = [
        np.arange(start, start + count, dtype=np.int64)[s.wanted]
        for s, start, count in zip(sequences, start_B.tolist(), num_rows_B.tolist(), strict=True)
    ]
    return StepLayout(
        sequences=sequences,
        token_ids_T=token_ids_T,
        drawn_M=drawn_M,
        positions_T=places.positions,
        slots_T=slots_of(pages, row_T, places.indices, block_size),
        wanted_N=np.concatenate(wanted),
        num_inputs_B=num_inputs_B,
        starts=start_B.astype(np.int32),
        counts=num_rows_B.astype(np.int32),
        first_keys=np.array([s.first_key for s in sequences], dtype=np.int32),
        ends=end_B.astype(np.int32),
        num_keys=(end_B + num_nodes_B).astype(np.int32),
        pages=pages,
        node_positions=node_positions.astype(np.int32),
        limits=places.limits.astype(np.int32),
        words=words,
    )


def _node_positions(nodes: Sequence[NodeInput], end_B: Ints, num_nodes_B: Ints) -> Ints:
    """Return the positions [B, N] of the nodes' keys."""
    positions_BN = np.zeros((len(nodes), int(num_nodes_B.max())), dtype=np.int64)
    depths: list[int] = []
    for sequence_nodes in nodes:
        depths += sequence_nodes.cached_depths
        depths += sequence_nodes.depths
    is_node_BN = np.arange(positions_BN.shape[1]) < num_nodes_B[:, None]
    positions_BN[is_node_BN] = np.repeat(end_B - 1, num_nodes_B) + depths
    return positions_BN


def _tokens(sequences: Sequence[SequenceInput], is_node_T: Bools, row_T: Ints) -> tuple[Ints, Ints]:
    """Return (token ids, 0 if only the device knows the token; rows of tokens with id 0)."""
    known = [token for s in sequences for part in (s.input_ids, s.nodes.tokens) for token in part]
    if len(known) == len(row_T):
        return np.array(known, dtype=np.int64), np.zeros(0, dtype=np.int64)
    is_drawn_B = np.array([len(s.nodes.tokens) < len(s.nodes.depths) for s in sequences])
    is_drawn_T = is_node_T & is_drawn_B[row_T]
    token_ids_T = np.zeros(len(row_T), dtype=np.int64)
    token_ids_T[~is_drawn_T] = known
    return token_ids_T, np.flatnonzero(is_drawn_T)


def _table(block_ids: Sequence[Sequence[int]]) -> Integers:
    """Return block ids [B, P], padded with 0."""
    if len(block_ids) == 1:
        return np.array(block_ids, dtype=np.int32)
    table = np.zeros((len(block_ids), max(map(len, block_ids))), dtype=np.int32)
    # The passes of a step repeat their sequences.
    arrays: dict[int, Integers] = {}
    for row, ids in zip(table, block_ids, strict=True):
        array = arrays.get(id(ids))
        if array is None:
            array = np.array(ids, dtype=np.int32)
            arrays[id(ids)] = array
        row[: len(ids)] = array
    return table
