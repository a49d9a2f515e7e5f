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
# Sizes that the common names do not reach, to keep the models small.
_MORE: dict[str, dict[str, Any]] = {
    "afmoe": _FEW_EXPERTS,
    "cwm": _NO_PADDING,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "gemma4_text": {"global_head_dim": 8, "num_global_key_value_heads": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "laguna": _FEW_EXPERTS,
    "modernbert-decoder": _NO_PADDING,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2_moe": _FEW_EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _FEW_EXPERTS,
}
NAMES = sorted(FITTING_MODEL_TYPES)


def family(name: str, seed: int = 3) -> LoadedModel:
    """Return a model by its `model_type`, as it would be loaded."""
    return tiny.load_model(transformers.AutoConfig.for_model(name, **SIZES | _MORE.get(name, {})), seed)
