"""A decoder like Llama without the layers' own Python: the same numbers in fewer calls.

transformers spends 0.2 to 0.3 ms of Python per layer, which is most of a pass over a few tokens of
a small model. Here a layer is about twenty tensor operations: q, k and v are one product, gate and
up another (`layer_products.py`, also for quantised weights), and rotation works on q and k
together. Attention goes through the same hook. A model is accepted by its modules. Every start
compares the decoder with transformers (`start/probe.py`), and a model that the decoder does not
reproduce runs through transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from engine.attention.attention import AttentionMetadata, attend
from engine.attention.groups import ScoreOptions
from engine.attention.paged import Paged
from engine.attention.tensors import NORMED
from engine.cuda.layer_check import use_kernels
from engine.cuda.layer_products import RowProduct, product
from engine.models.backend import Backend
from engine.models.checkpoint import context_length


@dataclass
class _Layer:
    layer_idx: int
    attention_norm: Tensor
    qkv: RowProduct
    norms: tuple[Tensor, Tensor] | None
    """Norms of q and k, or None."""
    output: RowProduct
    mlp_norm: Tensor
    gate_up: RowProduct
    down: RowProduct


class LeanDecoder(Backend):
    def __init__(self, model: Any, longest: int = 0) -> None:
        """Take over a model that `kinds.is_lean` accepts.

        The model's linear layers then share their memory with this object. longest: tokens of the
        longest text that it reads; 0 is the model's own limit. Only nodes that are never emitted
        lie after the text.
        """
        config = model.config
        body = model.model
        self._body = body
        self.kv_dtype = body.embed_tokens.weight.dtype
        self._eps = float(config.rms_norm_eps)
        self._num_heads = int(config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // self._num_heads
        self._head_dim = int(head_dim)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._scaling = float(body.layers[0].self_attn.scaling)
        half = torch.ones(self._head_dim // 2, dtype=model.dtype, device=model.device)
        self._sign = torch.cat([-half, half])
        self.use_kernels = use_kernels(torch.device(model.device), model.dtype)
        # At least one position, because the embedding of transformers looks for the largest.
        num_positions = 1
        if self.use_kernels:  # otherwise a pass computes its angles, in a dozen launches
            limit = context_length(config)
            num_positions = min(limit, longest or limit)
        self._rotation_PD = self._rotation(torch.arange(num_positions, device=model.device), half)
        self._product = partial(product, use_kernels=self.use_kernels)
        self._head = self._product([model.lm_head])
        self._layers = [self._layer(number, layer) for number, layer in enumerate(body.layers)]

    def prepare(self) -> int:
        """Return the memory of the angles: products on a device read weights unchanged."""
        return sum(part_PD.nbytes for part_PD in self._rotation_PD)

    def _layer(self, number: int, layer: Any) -> _Layer:
        attention = layer.self_attn
        mlp = layer.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        return _Layer(
            layer_idx=number,
            attention_norm=layer.input_layernorm.weight.detach(),
            qkv=self._product([attention.q_proj, attention.k_proj, attention.v_proj]),
            norms=norms,
            output=self._product([attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=self._product([mlp.gate_proj, mlp.up_proj]),
            down=self._product([mlp.down_proj]),
        )

    def logits(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        wanted_N: Tensor,
    ) -> Tensor:
        storage = metadata.storage
        slots = metadata.slots_T
        hidden_TD = embedding(token_ids_T, self._body.embed_tokens.weight)
        if metadata.paged is not None and self.use_kernels:
            return self._by_kernels(hidden_TD, positions_T, metadata, metadata.paged, wanted_N)
        cos_T1D, sin_T1D = (part_TD.unsqueeze(1) for part_TD in self._rotation(positions_T, hidden_TD))
        for layer in self._layers:
            storage.store(layer.layer_idx, slots, hidden_TD)
            hidden_TD = hidden_TD + self._attention(layer, hidden_TD, cos_T1D, sin_T1D, metadata)
            normed_TD = rms_norm(hidden_TD, hidden_TD.shape[-1:], layer.mlp_norm, self._eps)
            gate_TM, up_TM = layer.gate_up(normed_TD).chunk(2, -1)
            hidden_TD = hidden_TD + layer.down(silu(gate_TM) * up_TM)
        storage.store(len(self._layers), slots, hidden_TD)
        if NORMED not in storage.taps:
            return self._head(self._final_norm(hidden_TD[wanted_N]))
        hidden_TD = self._final_norm(hidden_TD)
        storage.store(NORMED, slots, hidden_TD)
        return self._head(hidden_TD[wanted_N])

    def _rotation(self, positions_T: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, D] of positions, the sines of the first half negated.

        like: has the dtype of the results.
        """
        cos_1TD, sin_1TD = self._body.rotary_emb(like, positions_T.unsqueeze(0))
        return cos_1TD[0], sin_1TD[0] * self._sign

    def _by_kernels(
        self,
        hidden_TD: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        paged: Paged,
        wanted_N: Tensor,
    ) -> Tensor:
        """Return the logits, with kernels between the products."""
        from engine.cuda import layer_kernels  # Triton is installed if kernels are used
        from engine.cuda.attention_kernel import attend_paged

        assert isinstance(metadata.slots_T, Tensor)
        storage = metadata.storage
        for layer in self._layers:
            storage.store(layer.layer_idx, metadata.slots_T, hidden_TD)
            normed_TD = layer_kernels.norm(hidden_TD, layer.attention_norm, self._eps)
            query_THD = layer_kernels.rotate_and_write(
                layer.qkv(normed_TD),
                self._rotation_PD,
                positions_T,
                layer.norms,
                self._eps,
                metadata.slots_T,
                storage.layers[layer.layer_idx],
            )
            query_1HTD = query_THD.transpose(0, 1).unsqueeze(0)
            options = ScoreOptions()
            attended = attend_paged(paged, storage, layer.layer_idx, query_1HTD, self._scaling, options, None)
            layer.output.add_to(hidden_TD, attended[0].flatten(1))
            normed_TD = layer_kernels.norm(hidden_TD, layer.mlp_norm, self._eps)
            layer.down.add_to(hidden_TD, layer_kernels.gate(layer.gate_up(normed_TD)))
        storage.store(len(self._layers), metadata.slots_T, hidden_TD)
        normed_TD = layer_kernels.norm(hidden_TD, self._body.norm.weight, self._eps)
        storage.store(NORMED, metadata.slots_T, normed_TD)
        return self._head(normed_TD[wanted_N])

    def _final_norm(self, hidden_TD: Tensor) -> Tensor:
        return rms_norm(hidden_TD, hidden_TD.shape[-1:], self._body.norm.weight, self._eps)

    def _attention(
        self,
        layer: _Layer,
        hidden_TD: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        normed_TD = rms_norm(hidden_TD, hidden_TD.shape[-1:], layer.attention_norm, self._eps)
        joined_TX = layer.qkv(normed_TD)
        heads_THD = joined_TX.view(len(joined_TX), -1, self._head_dim)
        num_heads = self._num_heads
        num_rotated = num_heads + self._num_kv_heads
        rotated_THD = heads_THD[:, :num_rotated]
        value_THD = heads_THD[:, num_rotated:]
        if layer.norms is not None:
            query_norm, key_norm = layer.norms
            size = (self._head_dim,)
            query_THD = rms_norm(rotated_THD[:, :num_heads], size, query_norm, self._eps)
            key_THD = rms_norm(rotated_THD[:, num_heads:], size, key_norm, self._eps)
            rotated_THD = torch.cat([query_THD, key_THD], 1)
        # Rotating by halves: roll swaps the halves, the sign is in `sin`.
        swapped_THD = rotated_THD.roll(self._head_dim // 2, -1)
        rotated_THD = torch.addcmul(rotated_THD * cos_T1D, swapped_THD, sin_T1D)
        query_1HTD, key_1HTD, value_1HTD = (
            part.transpose(0, 1).unsqueeze(0)
            for part in (rotated_THD[:, :num_heads], rotated_THD[:, num_heads:], value_THD)
        )
        attended, _ = attend(layer, query_1HTD, key_1HTD, value_1HTD, None, self._scaling, metadata=metadata)
        return layer.output(attended[0].flatten(1))
