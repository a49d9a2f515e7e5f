"""Common parts of heads: embeddings, an output head, a vocabulary within the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from engine.attention.tensors import KVShape
from engine.errors import LoadError
from engine.heads.config import HeadConfig


@dataclass(frozen=True)
class TargetWeights:
    """Weights of the target that heads may share."""

    embedding_VD: Tensor
    head_VD: Tensor

    @staticmethod
    def of(model: Any, dtype: torch.dtype) -> TargetWeights:
        """Return the weights of a transformers model that is not packed, in a head's type."""
        embedding_VD = model.get_input_embeddings().weight
        head_VD = model.get_output_embeddings().weight
        converted_VD = embedding_VD.detach().to(dtype)
        if head_VD is embedding_VD:
            return TargetWeights(converted_VD, converted_VD)
        return TargetWeights(converted_VD, head_VD.detach().to(dtype))


class HeadOutput(NamedTuple):
    """Results of a pass at the wanted rows."""

    state_NH: Tensor
    """States that rows below them read."""
    product_NX: Tensor
    """[N, draft vocabulary] Products with the output head."""


class Head(nn.Module):
    """Base of heads: everything but the layers."""

    d2t: Tensor | None
    """[draft vocabulary] Distance from a head's token to the target's."""

    def __init__(self, config: HeadConfig, names: frozenset[str]) -> None:
        """names: names of the checkpoint's tensors."""
        super().__init__()
        self.config = config
        width = config.hidden_size
        draft_vocab = config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if "embed_tokens.weight" in names else None
        self.lm_head = nn.Linear(width, draft_vocab, bias=False) if "lm_head.weight" in names else None
        self.register_buffer("d2t", torch.empty(draft_vocab, dtype=torch.int64) if "d2t" in names else None)
        self.shared: TargetWeights | None = None
        """From `attach` on."""
        self.target_ids: Tensor | None = None
        """[draft vocabulary] Token of the target; None for equal vocabularies."""

    def attach(self, target: TargetWeights) -> None:
        """Use the target's weights in place of missing ones; raise LoadError if they do not fit."""
        config = self.config
        for part, module, weight in (
            ("embeddings", self.embed_tokens, target.embedding_VD),
            ("output head", self.lm_head, target.head_VD),
        ):
            fits = weight.shape[1] == config.hidden_size and weight.is_floating_point()
            if module is None and not fits:
                raise LoadError(f"{config.name}: needs the target's {part}, whose width or type differ from the head's")
        self.shared = target
        self._num_embeddings = len(self.weight)
        self.shared_output: Callable[[Tensor], Tensor] = partial(linear, weight=target.head_VD)
        has_all_tokens = config.draft_vocab_size == config.vocab_size
        if not has_all_tokens and (self.d2t is None or self.lm_head is None):
            raise LoadError(f"{config.name}: the checkpoint lacks d2t or lm_head.weight of its smaller vocabulary")
        if self.d2t is None:
            return
        ids = torch.arange(config.draft_vocab_size, device=self.d2t.device) + self.d2t
        if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size or len(set(ids.tolist())) != len(ids):
            raise LoadError(f"{config.name}: d2t maps tokens outside the target's vocabulary, or two to the same")
        self.target_ids = ids

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def kv_shape(self) -> KVShape:
        layers = self.config.layers
        return KVShape.equal(layers.num_hidden_layers, layers.num_key_value_heads, layers.head_dim, layers.head_dim)

    def get_input_embeddings(self) -> Any:
        return self if self.embed_tokens is None else self.embed_tokens

    @property
    def weight(self) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens.weight
        assert self.shared is not None
        return self.shared.embedding_VD

    @property
    def num_embeddings(self) -> int:
        return self._num_embeddings

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return [T, H] embeddings, without the target's own processing."""
        return embedding(token_ids_T, self.weight)

    def logits(self, state_NH: Tensor, vocab_size: int) -> Tensor:
        """Return [N, V] float32 logits; minus infinity for tokens unknown to the head."""
        return self.in_target_tokens(self.own_logits(state_NH), vocab_size)

    def own_logits(self, state_NH: Tensor) -> Tensor:
        """Return [N, draft vocabulary] float32 logits."""
        return self.scaled(self.products(state_NH))

    def products(self, state_NH: Tensor) -> Tensor:
        product_NV: Tensor = (self.lm_head or self.shared_output)(state_NH)
        return product_NV

    def scaled(self, product_NV: Tensor) -> Tensor:
        """Return float32 logits from products with the output head."""
        logits_NV = product_NV.float() * self.config.logit_scale
        softcap = self.config.softcap
        if not softcap:
            return logits_NV
        return torch.tanh(logits_NV / softcap) * softcap

    def in_target_tokens(self, logits_NV: Tensor, vocab_size: int) -> Tensor:
        """Map logits of the head's own tokens to [N, V] logits of the target's tokens."""
        if self.target_ids is None and logits_NV.shape[1] >= vocab_size:
            return logits_NV[:, :vocab_size]
        ids = self.target_ids
        if ids is None:
            ids = torch.arange(logits_NV.shape[1], device=self.device)
        return logits_NV.new_full((len(logits_NV), vocab_size), -torch.inf).index_copy_(1, ids, logits_NV)
