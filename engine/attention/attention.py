"""Paged, tree-masked attention for unmodified transformers models.

One function is registered with transformers under `HOOK`. A model that is loaded with this
attention implementation calls it in every layer with rotated q and k. The pass is known by context
(`running`), because the layers of some models drop keywords. No mask function is registered under
the name, so transformers builds no mask; a layer's mask is found once (`masks.py`). (transformers
>= 5.17; `docs/architecture.md`.)

The plain path is one call for each group of sequences (`groups.py`), on any device. With a single
sequence in every group it is the oracle of the faster paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention import latent
from engine.attention.groups import Group, ScoreOptions, attend_group
from engine.attention.inputs import StepLayout
from engine.attention.masks import mask_of
from engine.attention.paged import Paged
from engine.attention.paths import Paths
from engine.attention.recurrent import PathCalls, computing
from engine.attention.tensors import KVTensors

HOOK = "polydraft_tree"


class PagedKernel(Protocol):
    """A kernel that attends for all sequences of a pass in one call."""

    @property
    def weight_bytes(self) -> int:
        """Return the memory of weights that the kernel has laid out for itself."""

    def attend_paged(
        self,
        paged: Paged,
        storage: KVTensors,
        layer: int,
        query: Tensor,
        scaling: float | None,
        kind: ScoreOptions,
        window: int | None,
    ) -> Tensor:
        """Return the attention of a flat pass, whose own K/V is already stored.

        query (1, H, T, D) -> (1, T, H, D_v).
        """

    def absorbed(self, module: Any, query: Tensor) -> Tensor:
        """Return `latent.absorbed`."""

    def expanded(self, module: Any, output: Tensor) -> Tensor:
        """Return `latent.expanded`."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Arguments of the hook for a flat pass."""

    storage: KVTensors
    slots_T: Tensor | slice
    """Slots to which the pass writes its K/V."""
    groups: Sequence[Group] = ()
    paged: Paged | None = None
    """Set if one kernel attends for all sequences; there are no groups then."""
    kernel: PagedKernel | None = None
    layout: StepLayout | None = None
    """Layout on the host, for backends with `reads_pages`; there are no groups then."""
    page_size: int = 0
    paths: Paths | None = None
    """Set if the model has recurrent layers."""

    def begun(self) -> AttentionMetadata:
        """Return the arguments of a new pass over the same buffers, whose numbers may be others."""
        return replace(self, paged=self.paged and self.paged._replace(shares={}))

    def store(self, layer: int, key_THD: Tensor, value_THD: Tensor) -> None:
        """Write a layer's K and V; a layer that reads the K/V of another has none."""
        if layer in self.storage.shared:
            return
        keys, values = self.storage.layers[layer]
        keys[self.slots_T] = key_THD
        if layer not in self.storage.latent:
            values[self.slots_T] = value_THD

    def attend(
        self,
        module: Any,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THD: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Return [T, H, D_v] attention of one layer, as the hook computes it."""
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query_THD, key_THD, value_THD))
        output, _ = attend(module, query, key, value, None, scaling, sliding_window=window, metadata=self)
        return output[0]


_RUNNING: ContextVar[tuple[AttentionMetadata, Tensor]] = ContextVar("running")


@contextmanager
def running(metadata: AttentionMetadata, positions_T: Tensor) -> Iterator[None]:
    """Let the hook attend for a pass, whose tokens have these positions."""
    calls = None
    if metadata.paths is not None:
        calls = PathCalls(metadata.storage, metadata.paths)
    token = _RUNNING.set((metadata, positions_T))
    try:
        with computing(calls):
            yield
    finally:
        _RUNNING.reset(token)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001  (transformers builds none)
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    metadata: AttentionMetadata | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in one layer (the hook).

    query (1, H, T, D), key and value (1, H_kv, T, D) -> ((1, T, H, D_v), None). metadata: of our
    own layers; else the running pass has it.
    """
    if metadata is None:
        metadata, positions_T = _RUNNING.get()
        query = _with_temperature(module, query, positions_T)
    mask = mask_of(module, sliding_window)
    layer = module.layer_idx
    metadata.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    options = ScoreOptions(softcap, s_aux, mask.chunk)
    if not latent.has_latents(module):
        return _attended(metadata, layer, query, scaling, options, mask.window), None
    products = metadata.kernel or latent
    output = _attended(metadata, layer, products.absorbed(module, query), scaling, options, mask.window)
    return products.expanded(module, output), None


def _attended(
    metadata: AttentionMetadata,
    layer: int,
    query: Tensor,
    scaling: float | None,
    options: ScoreOptions,
    window: int | None,
) -> Tensor:
    """Return the attention [1, T, H, D_v] of a pass whose K/V is stored."""
    operands = (metadata.storage, layer, query, scaling, options, window)
    if metadata.paged is not None:
        assert metadata.kernel is not None
        return metadata.kernel.attend_paged(metadata.paged, *operands)
    parts = [attend_group(group, *operands) for group in metadata.groups]
    if len(parts) == 1 and isinstance(metadata.groups[0].rows, slice):
        return parts[0].unsqueeze(0)
    output = parts[0].new_empty(query.shape[2], *parts[0].shape[1:])
    for group, part in zip(metadata.groups, parts, strict=True):
        output[group.real_rows] = part
    return output.unsqueeze(0)


def _with_temperature(module: Any, query: Tensor, positions_T: Tensor) -> Tensor:
    """Return queries (1, H, T, D) scaled by their positions, if their layer has counted rows.

    The layers of Llama 4 without a rotary embedding scale queries by the number of the row, which
    is the position in a pass of one text alone.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scale(place_T: Tensor) -> Tensor:
        length, share = float(module.floor_scale), float(module.attn_scale)
        return torch.log1p(torch.floor((place_T.float() + 1) / length)) * share + 1

    rows_T = torch.arange(len(positions_T), device=positions_T.device)
    ratio_T = scale(positions_T) / scale(rows_T)
    return (query * ratio_T[:, None]).to(query.dtype)


def register() -> None:
    """Make `HOOK` known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(HOOK, attend)
