"""The layers of heads in plain torch.

K and V lie in a `Memory`. In the engine that is a pass's metadata (`attention/attention.py`), so
that a head's K/V is paged like the target's. Training has its own memories of whole texts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from engine.models.importing import import_transformers

Rotation = tuple[Tensor, Tensor]


class Memory(Protocol):
    """K and V of earlier rows, and of a pass's own."""

    def store(self, layer: int, key_THD: Tensor, value_THD: Tensor) -> None:
        """Write K and V of a pass's rows."""

    def attend(
        self, module: Any, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Return [T, H, D] attention in the layer `module.layer_idx`, whose K and V are stored."""


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, state: Tensor) -> Tensor:
        # Training computes products in bfloat16 and stores weights in float32.
        return rms_norm(state.to(self.weight.dtype), state.shape[-1:], self.weight, self._eps)


class Rotary(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        llama = import_transformers().models.llama.modeling_llama
        # Heads are created without memory for their weights, but these numbers are computed.
        with torch.device("cpu"):
            self.embedding = llama.LlamaRotaryEmbedding(config)

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        like = torch.empty(0, dtype=dtype, device=positions_T.device)
        cosines, sines = self.embedding(like, positions_T.unsqueeze(0))
        return cosines[0].unsqueeze(1), sines[0].unsqueeze(1)


class Attention(nn.Module):
    def __init__(self, config: Any, number: int, input_size: int) -> None:
        super().__init__()
        self.layer_idx = number
        slides = getattr(config, "layer_types", None) and config.layer_types[number] == "sliding_attention"
        self.sliding_window = config.sliding_window if slides else None
        self.head_dim = int(config.head_dim)
        self.scaling = self.head_dim**-0.5
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        has_bias = bool(getattr(config, "attention_bias", False))
        self.q_proj = nn.Linear(input_size, num_heads * self.head_dim, bias=has_bias)
        self.k_proj = nn.Linear(input_size, num_kv_heads * self.head_dim, bias=has_bias)
        self.v_proj = nn.Linear(input_size, num_kv_heads * self.head_dim, bias=has_bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, config.hidden_size, bias=has_bias)
        has_norms = config.model_type == "qwen3"
        self.q_norm = Norm(self.head_dim, config.rms_norm_eps) if has_norms else nn.Identity()
        self.k_norm = Norm(self.head_dim, config.rms_norm_eps) if has_norms else nn.Identity()

    def forward(self, state_TX: Tensor, rotation: Rotation, memory: Memory) -> Tensor:
        """Return [T, H] attention of a pass, whose K and V are stored."""
        query_THD = rotated(self.q_norm(self._heads(self.q_proj, state_TX)), rotation)
        key_THD, value_THD = self.keys_and_values(state_TX, rotation)
        attended_THD = memory.attend(self, query_THD, key_THD, value_THD, self.scaling, self.sliding_window)
        output_TH: Tensor = self.o_proj(attended_THD.flatten(1))
        return output_TH

    def store(self, state_TX: Tensor, rotation: Rotation, memory: Memory) -> None:
        """Store K and V of states without computing attention."""
        memory.store(self.layer_idx, *self.keys_and_values(state_TX, rotation))

    def keys_and_values(self, state_TX: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return [T, heads, head_dim] K and V of states."""
        key_THD = rotated(self.k_norm(self._heads(self.k_proj, state_TX)), rotation)
        return key_THD, self._heads(self.v_proj, state_TX)

    def _heads(self, projection: nn.Linear, state_TX: Tensor) -> Tensor:
        return projection(state_TX).view(len(state_TX), -1, self.head_dim)  # type: ignore[no-any-return]


def rotated(heads_THD: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = rotation
    first, second = heads_THD.chunk(2, -1)
    return heads_THD * cosines + torch.cat([-second, first], -1) * sines


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, state_TH: Tensor) -> Tensor:
        output_TH: Tensor = self.down_proj(silu(self.gate_proj(state_TH)) * self.up_proj(state_TH))
        return output_TH


class DecoderLayer(nn.Module):
    """A decoder layer like Llama's."""

    def __init__(self, config: Any, number: int, input_size: int | None = None) -> None:
        """input_size: of the products of q, k and v; None is the width of states."""
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, number, input_size or config.hidden_size)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, state_TH: Tensor, rotation: Rotation, memory: Memory) -> Tensor:
        state_TH = state_TH + self.self_attn(self.input_layernorm(state_TH), rotation, memory)
        output_TH: Tensor = state_TH + self.mlp(self.post_attention_layernorm(state_TH))
        return output_TH
