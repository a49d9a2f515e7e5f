"""Tiny models of every family that is served, with random weights."""

from __future__ import annotations

from typing import Any

import transformers

from engine.start.architectures import FITTING_MODEL_TYPES
from engine.start.loading import LoadedModel
from tests.engine import tiny

VOCABULARY = 101
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "pad_token_id": None,
}
_NO_PADDING = {"bos_token_id": 1, "pad_token_id": 0}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "num_kv_shared_layers": 3,
}
# The layouts that are published: heads of two widths; the small models share K/V and have
# embeddings for each layer, the large ones have fewer K/V heads, whose V is K before its norm.
GEMMA_4_SMALL = _SHARED_KV | {
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": VOCABULARY,
}
GEMMA_4_LARGE = _SHARED_KV | {
    "attention_k_eq_v": True,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
}
_LATENTS: dict[str, Any] = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_LATENTS_AND_EXPERTS = _LATENTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Sizes that the common names do not reach, to keep the models small.
_MORE: dict[str, dict[str, Any]] = {
    "afmoe": _FEW_EXPERTS,
    "axk1": _LATENTS_AND_EXPERTS,
    "cwm": _NO_PADDING,
    "deepseek_v2": _LATENTS_AND_EXPERTS,
    "deepseek_v3": _LATENTS_AND_EXPERTS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "gemma3n_text": _SHARED_KV | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "gemma4_text": GEMMA_4_SMALL,
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4_moe_lite": _LATENTS_AND_EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "laguna": _FEW_EXPERTS,
    "longcat_flash": _LATENTS
    | {
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "minicpm3": _LATENTS,
    "modernbert-decoder": _NO_PADDING,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2_moe": _FEW_EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _FEW_EXPERTS,
    "youtu": _LATENTS,
}
NAMES = sorted(FITTING_MODEL_TYPES)


def config(name: str, **more: Any) -> Any:
    """Return the configuration of a small model by its `model_type`."""
    return transformers.AutoConfig.for_model(name, **SIZES | _MORE.get(name, {}) | more)


def family(name: str, seed: int = 3) -> LoadedModel:
    """Return a model by its `model_type`, as it would be loaded."""
    return tiny.load_model(config(name), seed)
