"""Heads of the EAGLE types on a CPU: their passes in one call each, by the decoder of language models.

A head's own modules (`eagle.py`) are the oracle: every start compares one pass with them, and a head whose numbers
differ runs through them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.attention.inputs import NodeInput, SequenceInput
from engine.attention.tensors import KVShape
from engine.models import numba_table as nt
from engine.models.backend import Backend
from engine.models.cpu_decoder import CpuDecoder
from engine.models.cpu_weights import Product, stored_types
from engine.models.heads.eagle import Eagle3
from engine.models.heads.head import Head, TargetWeights
from engine.models.heads.runner import HeadBackend, HeadRunner, TorchHead
from engine.models.kinds import may_decode
from engine.models.packing import pack, take_over

log = logging.getLogger("polydraft")

_TOLERANCE = 1e-3
"""Largest difference of a number, as a share of the largest one."""


class HeadDecoder(CpuDecoder):
    """Runs the passes of one head."""

    def __init__(self, head: Any, target: Backend, dtype: torch.dtype) -> None:
        """Lay out a head's weights.

        target: the target's backend, whose embeddings and output head are used in place of missing ones if it has them
        in the same type. dtype: of the stored weights, if it has all their numbers; otherwise they are stored in
        float32.
        """
        self._head = head
        stored = dtype if all(_fits(weight, dtype) for weight in _decoded_weights(head)) else torch.float32
        super().__init__(_as_model(head), dtype=stored, shared=_shared(head, target, stored))
        config, ids = head.config, head.target_ids
        self._put(nt.NORM_FLAGS, np.array([config.norm_before_residual, config.norm_output], dtype=np.int64))
        self.target_ids = None if ids is None else ids.numpy()
        self.has_plain_logits = config.logit_scale == 1 and not config.softcap

    def prepare(self, works: Callable[[], bool]) -> int:  # noqa: ARG002
        """Drop the head's own weights, and pack those that are used outside of passes."""
        head = self._head
        for module in _decoded_modules(head):
            module.weight.data = module.weight.data.new_empty(0)
        head.shared = TargetWeights(torch.empty(0), torch.empty(0))
        return self.weight_bytes + pack([product for product in take_over(head) if product.shape != (0,)])


def backend_of(head: Any, shape: KVShape, target: Backend, dtype: torch.dtype, block_size: int) -> HeadBackend:
    """Return the backend of a head on a CPU. target, dtype: see `HeadDecoder`."""
    plain = TorchHead(head)
    if not isinstance(head, Eagle3) or not may_decode(head.config.layers):
        return plain
    try:
        decoder = HeadDecoder(head, target, dtype)
        difference = _difference(head, shape, (plain, decoder), block_size)
    except Exception as error:  # weights of other shapes, a kernel that cannot be compiled
        log.warning("%s: runs without the CPU decoder: %s", head.config.name, error)
        return plain
    if not difference <= _TOLERANCE:
        log.warning("%s: runs without the CPU decoder, whose numbers differ by %.2g", head.config.name, difference)
        return plain
    return decoder


def _difference(head: Head, shape: KVShape, backends: Sequence[HeadBackend], block_size: int) -> float:
    """Return the largest difference between two backends' states and products, as a share of the largest number."""
    num_rows = 20
    tree = NodeInput((1, 2, 3), (1, 1, 2), (), np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=np.bool_))
    tokens = [7919 * row % head.config.vocab_size for row in range(num_rows)]
    blocks = range(-(-(num_rows + 4) // block_size))
    part = SequenceInput(tokens, 1, blocks, tree, slice(num_rows - 2, None), 1)
    width = head.config.hidden_size
    state_TH = (torch.arange((num_rows + 3) * width) * 0.7).sin().view(-1, width)
    found = []
    for backend in backends:
        runner = HeadRunner(head, shape, len(blocks), block_size, head.config.vocab_size, backend)
        found.append(runner.states(runner.prepare([[part]])[0], state_TH))
    return max(
        float((one - other).abs().max() / one.abs().max().clamp(min=1e-6)) for one, other in zip(*found, strict=True)
    )


def _as_model(head: Any) -> Any:
    """Return a head's modules by the names that they have in a language model."""
    output = SimpleNamespace(weight=head.shared.head_VD, bias=None) if head.lm_head is None else head.lm_head
    body = SimpleNamespace(
        layers=head.layers,
        embed_tokens=head.get_input_embeddings(),
        norm=head.norm,
        rotary_emb=head.rotary.embedding,
    )
    return SimpleNamespace(config=head.config.layers, model=body, lm_head=output)


def _shared(head: Any, target: Backend, dtype: torch.dtype) -> dict[int, Product]:
    """Return the products of the target's decoder that a head can use as they are."""
    if not isinstance(target, CpuDecoder) or target.stored_as != stored_types(dtype, False, False)[0]:
        return {}
    missing = {nt.EMBEDDING: head.embed_tokens, nt.LM_HEAD: head.lm_head}
    shared = {field: target.products[field] for field, own in missing.items() if own is None}
    return {field: one for field, one in shared.items() if field == nt.EMBEDDING or not one.bias.any()}


def _decoded_modules(head: Any) -> list[Any]:
    """Return the modules whose weights the decoder has."""
    parts = [head.layers, *(part for part in (head.embed_tokens, head.lm_head) if part is not None)]
    return [module for part in parts for module in part.modules() if isinstance(module, nn.Linear | nn.Embedding)]


def _decoded_weights(head: Any) -> list[Tensor]:
    shared = [head.shared.embedding_VD, head.shared.head_VD]
    return [*shared, *(module.weight for module in _decoded_modules(head))]


def _fits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether a type has all numbers of a float32 weight."""
    return bool(torch.equal(weight.to(dtype).float(), weight))
