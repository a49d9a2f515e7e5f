"""Runs one model over flat batches against its paged K/V.

The runner owns the model's K/V tensors; which slots hold what is the scheduler's accounting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention.attention import AttentionMetadata, PagedKernel
from engine.attention.groups import groups_of
from engine.attention.inputs import NO_NODES, Ints, SequenceInput, StepLayout, build, build_all
from engine.attention.paged import DevicePass, Paged, on_host, upload
from engine.attention.paths import Paths
from engine.attention.states import FEW_STATES, StateSizes
from engine.attention.tensors import KVShape, KVTensors
from engine.kernels.protocol import KVMoves
from engine.kernels.torch_kernels import TORCH, Kernels
from engine.models.backend import Backend, TransformersBackend
from engine.models.parallel import Ranks

Replay = Callable[[DevicePass, Tensor | None], Tensor]
"""Computes [N, V] logits (float32) of a pass; operands as those of `run`."""


class Pass(NamedTuple):
    """A prepared pass."""

    metadata: AttentionMetadata
    tensors: DevicePass
    replay: Replay | None = None
    """Set if the device has recorded such passes."""


class PassMenu(Protocol):
    """Passes that a device has recorded."""

    def fitted(self, layout: StepLayout) -> tuple[StepLayout, Replay | None]:
        """Return a pass as computed, and its replay, None without a recorded room."""


class ModelRunner:
    """A transformers causal LM with the attention hook.

    `vocab_size` is the width of the distributions made from its logits: the logits of a draft model
    with another width are cut to it, or extended by tokens that it never proposes. Tokens without
    an embedding are read as token 0, which only changes its proposals.
    """

    def __init__(
        self,
        model: Any,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        backend: Backend | None = None,
        ranks: Ranks | None = None,
        paged_kernel: PagedKernel | None = None,
        has_spare_block: bool = False,
        kernels: Kernels = TORCH,
        never_written: Sequence[int] = (),
        sizes: StateSizes = FEW_STATES,
    ) -> None:
        """backend: None is transformers; ranks: processes of a split model.

        paged_kernel: attends for all sequences at once; has_spare_block: one block more than the
        pool, for padding; kernels: operations on distributions, chains and K/V; never_written:
        tokens whose logits are minus infinity; sizes: of the storage of states of recurrent layers.
        """
        self.paged_kernel = paged_kernel
        self._ranks = ranks
        if ranks is not None:
            ranks.tell("runner", num_blocks, block_size, vocab_size)
        self.model = model
        self.backend = backend or TransformersBackend(model)
        self.device = torch.device(model.device)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.kernels = kernels
        self.recorded_passes: PassMenu | None = None
        self.num_embeddings = int(model.get_input_embeddings().num_embeddings)
        """Number of tokens that the model can read."""
        self._never_written = torch.tensor(never_written, device=self.device) if never_written else None
        kv_dtype = self.backend.kv_dtype
        self.token_bytes = shape.token_bytes(kv_dtype)
        self._layer_bytes = shape.layer_bytes(kv_dtype)
        self._is_recurrent = bool(shape.calls)
        num_slots = (num_blocks + has_spare_block) * block_size
        self.storage = KVTensors(shape, num_slots, kv_dtype, self.device, kernels, sizes)

    @property
    def fast_paths(self) -> dict[str, bool]:
        """Return by name whether each fast path is used."""
        return {
            "fast decoder": not isinstance(self.backend, TransformersBackend),
            "paged attention": self.paged_kernel is not None,
        }

    @property
    def is_split(self) -> bool:
        """Whether other processes hold parts of the model; they need all tokens on the host."""
        return self._ranks is not None

    def forward(self, sequences: Sequence[SequenceInput], drawn_M: Tensor | None = None) -> Tensor:
        """Return logits [N, V] (float32) at the wanted tokens of all sequences, in order.

        drawn_M: the tokens of all nodes that have none on the host, in order.
        """
        if self._ranks is not None:
            assert drawn_M is None, "what is drawn on this device is not known to the other ranks"
            self._ranks.tell("forward", sequences)
        return self.run(self._prepared([build(sequences, self.block_size)])[0], drawn_M)

    def prepare(self, passes: Sequence[Sequence[SequenceInput]]) -> list[Pass]:
        """Prepare several passes, for `run`."""
        assert not self.is_split, "what is drawn on this device is not known to the other ranks"
        return self._prepared(build_all(passes, self.block_size))

    @torch.inference_mode()
    def run(self, prepared: Pass, drawn_M: Tensor | None = None) -> Tensor:
        """Return [N, V] logits (float32) of a pass; drawn_M: on the device only."""
        tensors = prepared.tensors
        if prepared.replay is not None:
            return prepared.replay(tensors, drawn_M)
        token_ids_T = self.token_ids(tensors, drawn_M)
        return self._compute(token_ids_T, tensors.positions_T, prepared.metadata, tensors.wanted_N).float()

    def run_on_device(
        self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor
    ) -> Tensor:
        """Return [N, V] logits, in the model's type, of a pass on the device."""
        if self.num_embeddings < self.vocab_size:
            token_ids_T = torch.where(token_ids_T < self.num_embeddings, token_ids_T, 0)
        return self._compute(token_ids_T, positions_T, metadata, wanted_N)

    def token_ids(self, tensors: DevicePass, drawn_M: Tensor | None) -> Tensor:
        """Return all tokens [T] of a pass. drawn_M: tokens that only the device knows."""
        if drawn_M is None:
            return tensors.token_ids_T
        if self.num_embeddings < self.vocab_size:
            drawn_M = torch.where(drawn_M < self.num_embeddings, drawn_M, 0)
        if len(tensors.drawn_M) == len(tensors.token_ids_T):
            return drawn_M
        return tensors.token_ids_T.index_copy(0, tensors.drawn_M, drawn_M)

    def _compute(
        self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor
    ) -> Tensor:
        """Return [N, V] logits at the wanted tokens of a flat pass."""
        logits_NV = self.backend.logits(token_ids_T, positions_T, metadata.begun(), wanted_N)
        missing = self.vocab_size - logits_NV.shape[-1]
        if self._never_written is not None:
            logits_NV = logits_NV.index_fill(1, self._never_written, -torch.inf)
        if missing > 0:
            return torch.nn.functional.pad(logits_NV, (0, missing), value=-torch.inf)
        return logits_NV[:, : self.vocab_size]

    def keep(self, moves: Sequence[KVMoves], node_moves: Sequence[tuple[int, int, int]] = ()) -> None:
        """Move K/V to its final slots (`KVTensors.keep`), and inputs of nodes (`States.keep`)."""
        if self._ranks is not None:
            self._ranks.tell("keep", moves)
        with torch.inference_mode():
            self.storage.keep(moves)
            self.storage.states.keep(node_moves)

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Clear the K/V of blocks."""
        if self._ranks is not None:
            self._ranks.tell("wipe", block_ids)
        slots = torch.tensor(block_ids, dtype=torch.int64).unsqueeze(1) * self.block_size + torch.arange(
            self.block_size
        )
        with torch.inference_mode():
            self.storage.wipe(slots.flatten().to(self.device))

    def tune(self, most_cores: int) -> None:
        """Measure on how many cores passes are fastest; needs an unused pool."""
        num_slots = self.storage.num_slots

        def run(num_rows: int) -> Tensor:
            num_rows = min(num_rows, num_slots)
            blocks = range(-(-num_rows // self.block_size))
            return self.forward([SequenceInput([0] * num_rows, 0, blocks, NO_NODES, slice(0, None))])

        with torch.inference_mode():
            self.backend.tune(run, most_cores)

    def _prepared(self, layouts: Sequence[StepLayout]) -> list[Pass]:
        """Bring passes to the device, all in one copy."""
        if self.num_embeddings < self.vocab_size:
            for layout in layouts:
                layout.token_ids_T[layout.token_ids_T >= self.num_embeddings] = 0
        replays: Sequence[Replay | None] = [None] * len(layouts)
        if self.recorded_passes is not None and layouts:
            layouts, replays = zip(*map(self.recorded_passes.fitted, layouts), strict=True)
        if self.paged_kernel is not None or self.device.type != "cpu":
            moved = upload(layouts, self.block_size, self.device)
        else:
            moved = list(map(on_host, layouts))
        parts = zip(layouts, moved, replays, strict=True)
        return [Pass(self._metadata(layout, one), one, replay) for layout, one, replay in parts]

    def paged_metadata(self, slots_T: Tensor, paged: Paged | None) -> AttentionMetadata:
        """Return the arguments of the hook for a pass over pages."""
        return AttentionMetadata(self.storage, slots_T, paged=paged, kernel=self.paged_kernel)

    def _metadata(self, layout: StepLayout, tensors: DevicePass) -> AttentionMetadata:
        if self.backend.reads_pages:
            return AttentionMetadata(self.storage, tensors.slots_T, layout=layout, page_size=self.block_size)
        paths = Paths(layout, self.storage.states.sizes, self.device) if self._is_recurrent else None
        if self.paged_kernel is not None:
            return replace(self.paged_metadata(tensors.slots_T, tensors.paged), paths=paths)
        slots = _as_slice(layout.slots_T)
        groups = groups_of(layout, self.block_size, self._layer_bytes, self.device)
        return AttentionMetadata(self.storage, tensors.slots_T if slots is None else slots, groups, paths=paths)


def _as_slice(slots_T: Ints) -> slice | None:
    """Return slots as a slice if they are contiguous."""
    first, count = int(slots_T[0]), len(slots_T)
    follow = slots_T[-1] - first == count - 1 and (count < 3 or bool((np.diff(slots_T) == 1).all()))
    return slice(first, first + count) if follow else None
