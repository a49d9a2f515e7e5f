"""Passes of any plan that are replayed as CUDA graphs.

A recorded step holds drafting, pass and verdict, and has one token of the text in each row. Other
steps launch their operations one by one; their passes, which are nearly all of these operations,
are replayed if a recorded pass has room for them. A pass runs in the smallest room: its arrays are
padded on the host, copied to the room's buffers, and the graph over these buffers is replayed. The
rows of padding belong to one more sequence, which sees no key and writes to a spare block.

Without CUDA nothing is recorded, and the same padded pass is computed; the tests use this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.inputs import NO_NODES, SequenceInput, StepLayout, build
from engine.attention.paged import DevicePass, upload
from engine.cuda.recorded.inputs import MOST_NODES
from engine.models.runner import ModelRunner, Replay

Record = Callable[[Callable[[], None]], torch.cuda.CUDAGraph]

_FEW_QUERIES, _MANY_QUERIES = 4, 64
"""Queries of each sequence for which tiles of attention are chosen."""
_ROWS = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_PROMPT_ROWS = (768, 1024, 1536, 2048)
"""Rows of passes; more rows take the device longer than the host."""
MOST_WANTED = _ROWS[-1]


class PassRoom(NamedTuple):
    rows: int
    num_wanted: int
    num_queries: int
    """Queries of a sequence that suit its tiles of attention; others are computed, too."""

    def has_room(self, layout: StepLayout) -> bool:
        """Whether a pass fits, and its tiles suit it."""
        is_suited = self.num_queries == _MANY_QUERIES or layout.counts.max() <= self.num_queries
        return is_suited and self.rows >= len(layout.token_ids_T) and self.num_wanted >= len(layout.wanted_N)


def pass_rooms(most_sequences: int) -> list[PassRoom]:
    """Return the recorded rooms, from small to large; most_sequences: of a step."""
    rooms = {PassRoom(rows, rows, queries) for rows in _ROWS for queries in (_FEW_QUERIES, _MANY_QUERIES)}
    rooms |= {PassRoom(rows, min(rows, most_sequences), _MANY_QUERIES) for rows in (*_ROWS, *_PROMPT_ROWS)}
    return sorted(room for room in rooms if room.num_wanted <= MOST_WANTED)


class _Buffers(NamedTuple):
    """Memory that all recorded passes of a model share, because they run one after the other."""

    pages: Tensor
    """[S, P]"""
    logits_NV: Tensor
    spare_slot: int

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences, with the sequence of padding."""
        return len(self.pages)


class RecordedPass:
    """A pass of one room: its buffers, and the graph over them."""

    def __init__(self, runner: ModelRunner, room: PassRoom, shared: _Buffers) -> None:
        self.room = room
        self._runner = runner
        self._shared = shared
        spare_block = shared.spare_slot // runner.block_size
        nothing = build([SequenceInput([0], 0, [spare_block], NO_NODES, slice(None))], runner.block_size)
        (tensors,) = upload([self.padded(nothing)], runner.block_size, runner.device)
        assert tensors.paged is not None
        paged = tensors.paged._replace(
            pages=shared.pages,
            most_queries=room.num_queries,
            most_keys=shared.pages.shape[1] * runner.block_size,
            total_keys=0,
            num_scores=0,
        )
        self._tensors = tensors._replace(paged=paged)
        self._metadata = runner.paged_metadata(tensors.slots_T, paged)
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, record: Record) -> None:
        self._graph = record(self.work)

    def work(self) -> None:
        tensors = self._tensors
        logits_NV = self._runner.run_on_device(
            tensors.token_ids_T, tensors.positions_T, self._metadata, tensors.wanted_N
        )
        self._shared.logits_NV[: self.room.num_wanted].copy_(logits_NV)

    def padded(self, layout: StepLayout) -> StepLayout:
        shared = self._shared
        num_rows, num_sequences = len(layout.token_ids_T), len(layout.starts)
        padding: dict[str, Any] = {}
        for name in ("token_ids_T", "positions_T", "limits", "words"):
            padding[name] = _longer(getattr(layout, name), self.room.rows)
        for name in ("starts", "counts", "first_keys", "ends", "num_keys", "num_inputs_B"):
            padding[name] = _longer(getattr(layout, name), shared.num_sequences)
        padding["starts"][num_sequences] = num_rows
        padding["counts"][num_sequences] = self.room.rows - num_rows
        node_positions = np.zeros((shared.num_sequences, MOST_NODES), dtype=np.int32)
        node_positions[:num_sequences, : layout.node_positions.shape[1]] = layout.node_positions
        return replace(
            layout,
            **padding,
            node_positions=node_positions,
            slots_T=_longer(layout.slots_T, self.room.rows, shared.spare_slot),
            wanted_N=_longer(layout.wanted_N, self.room.num_wanted),
        )

    def logits(self, num_wanted: int, tensors: DevicePass, drawn_M: Tensor | None) -> Tensor:
        """Return logits [N, V] (float32) at the `num_wanted` tokens of a padded pass."""
        assert tensors.paged is not None
        own = self._tensors
        own.numbers.copy_(tensors.numbers)
        pages = tensors.paged.pages
        self._shared.pages[: pages.shape[0], : pages.shape[1]].copy_(pages)
        if drawn_M is not None:
            own.token_ids_T.index_copy_(0, tensors.drawn_M, drawn_M)
        if self._graph is None:
            self.work()
        else:
            self._graph.replay()
        return self._shared.logits_NV[:num_wanted].to(torch.float32, copy=True)


class RecordedPasses:
    """The recorded passes of one model."""

    def __init__(self, runner: ModelRunner, most_sequences: int, most_pages: int, spare_block: int) -> None:
        """Allocate the buffers. spare_block: for the K/V of padding."""
        shared = _Buffers(
            torch.zeros((most_sequences + 1, most_pages), dtype=torch.int32, device=runner.device),
            torch.zeros((MOST_WANTED, runner.vocab_size), dtype=runner.model.dtype, device=runner.device),
            spare_block * runner.block_size,
        )
        self._shared = shared
        self._passes = [RecordedPass(runner, room, shared) for room in pass_rooms(most_sequences)]
        self._num_recorded = 0

    def record(self, record: Record | None) -> Iterator[None]:
        """Record all passes, one for each item; without CUDA they are only made usable."""
        for recorded_pass in self._passes:
            if record is not None:
                recorded_pass.record(record)
            self._num_recorded += 1
            yield

    def widest(self) -> Callable[[], None]:
        """Return the work of the largest pass."""
        return self._passes[-1].work

    def fitted(self, layout: StepLayout) -> tuple[StepLayout, Replay | None]:
        """Return a pass as it is computed, and its replay, None without a recorded room."""
        shared = self._shared
        num_sequences, num_pages = layout.pages.shape
        if num_sequences >= shared.num_sequences or num_pages > shared.pages.shape[1]:
            return layout, None
        if layout.node_positions.shape[1] > MOST_NODES or layout.words.shape[1] > 1:
            return layout, None
        for recorded_pass in self._passes[: self._num_recorded]:
            if recorded_pass.room.has_room(layout):
                return recorded_pass.padded(layout), partial(recorded_pass.logits, len(layout.wanted_N))
        return layout, None


def _longer(array: npt.NDArray[Any], count: int, value: int = 0) -> npt.NDArray[Any]:
    """Return an array with `count` rows; the rows after its own have a value."""
    result = np.full((count, *array.shape[1:]), value, dtype=array.dtype)
    result[: len(array)] = array
    return result


def logits_bytes(dtypes: Sequence[torch.dtype], vocab_size: int) -> int:
    """Return the bytes of the logits of recorded passes. dtypes: number formats of the models."""
    return sum(MOST_WANTED * vocab_size * dtype.itemsize for dtype in dtypes)
