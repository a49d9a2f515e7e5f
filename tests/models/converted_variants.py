"""Variants of converted files, for every set of keys of an architecture's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONTEXT, ORIGINAL = 512, 128
NARROW, WIDE = 64, 256
"""Hidden sizes. Types with blocks of 256 numbers need the larger one."""


@dataclass(frozen=True)
class Variant:
    """A set of keys."""

    architecture: str
    """Name that llama.cpp has for it."""
    published: str
    """Models that have these keys."""
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration, besides the common ones."""
    hidden: int = NARROW
    left_out: tuple[str, ...] = ()
    """Keys that an older converter did not write."""

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of transformers' configuration."""
        sizes = _GPT2 if self.model_type == "gpt2" else _sizes(self.hidden)
        return {**sizes, **self.changes}


def _sizes(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


_GPT2 = {
    "vocab_size": 4096,
    "n_embd": WIDE,
    "n_inner": 4 * WIDE,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "n_ctx": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TIED = {"tie_word_embeddings": True}


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {**_rope(500000.0, rope_type="llama3", factor=factor, **scaling), "head_dim": 16}


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_LINEAR = {"rope_type": "linear", "factor": 8.0}


def _longrope(partial: float) -> dict[str, Any]:
    num_divisors = int(NARROW // 4 * partial) // 2
    return _rope(
        10000.0,
        rope_type="longrope",
        partial_rotary_factor=partial,
        original_max_position_embeddings=ORIGINAL,
        short_factor=[1.0 + 0.05 * place for place in range(num_divisors)],
        long_factor=[1.25 + 0.5 * place for place in range(num_divisors)],
    ) | {"original_max_position_embeddings": ORIGINAL}


def _gemma(width: int, window: int = 64, layers: int = 2, hidden: int = NARROW) -> dict[str, Any]:
    """Return the fields of a Gemma; width: its root scales the attention."""
    tied = _TIED | {"head_dim": hidden // 2, "query_pre_attn_scalar": width}
    return tied | {"sliding_window": window, "num_hidden_layers": layers, "rms_norm_eps": 1e-6}


def _gemma3(full: Mapping[str, Any]) -> dict[str, Any]:
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    full = {"rope_type": "default", "rope_theta": 1e6, **full}
    return {"rope_parameters": {"sliding_attention": sliding, "full_attention": full}}


def _experts(hidden: int) -> dict[str, Any]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}


_SWA = ("rope.freq_base_swa",)
VARIANTS = {
    "llama-2": Variant("llama", "Llama 1 and 2, TinyLlama", "llama", {"num_key_value_heads": 4}),
    "llama-3": Variant("llama", "Llama 3", "llama", _rope(500000.0), WIDE),
    "llama-3.1": Variant("llama", "Llama 3.1, 3.3", "llama", _llama3(8.0)),
    "llama-3.2": Variant("llama", "Llama 3.2", "llama", _llama3(32.0) | _TIED),
    "smollm2": Variant("llama", "SmolLM, SmolLM2", "llama", _rope(100000.0) | _TIED),
    "mistral": Variant("llama", "Mistral 7B v0.1 to v0.3", "mistral", _rope(1e6) | {"sliding_window": None}),
    "nemo": Variant("llama", "Mistral Nemo, Mistral Small", "mistral",
                    _rope(1e6) | {"sliding_window": None, "head_dim": 32}),
    "llama-linear": Variant("llama", "Vicuna 16k, Deepseek Coder", "llama", _rope(10000.0, **_LINEAR)),
    "llama-yarn": Variant("llama", "Yarn-Llama-2", "llama", _rope(10000.0, **_YARN)),
    "qwen2": Variant("qwen2", "Qwen 1.5, 2 and 2.5 from 7B", "qwen2", _rope(1e6), WIDE),
    "qwen2-tied": Variant("qwen2", "Qwen 2 and 2.5 to 3B", "qwen2", _rope(1e6) | _TIED),
    "qwen2-yarn": Variant("qwen2", "Qwen 2.5 with YaRN", "qwen2", _rope(1e6, **_YARN)),
    "qwen3": Variant("qwen3", "Qwen 3 from 8B", "qwen3", _rope(1e6) | {"head_dim": 128}, WIDE),
    "qwen3-tied": Variant("qwen3", "Qwen 3 to 4B", "qwen3", _rope(1e6) | _TIED | {"head_dim": 32}),
    "qwen3-yarn": Variant("qwen3", "Qwen 3 with YaRN", "qwen3", _rope(1e6, **_YARN) | {"head_dim": 32}),
    "gemma2": Variant("gemma2", "Gemma 2 of 2B and 9B", "gemma2", _gemma(128, hidden=WIDE), WIDE),
    "gemma2-27b": Variant("gemma2", "Gemma 2 of 27B", "gemma2", _gemma(16, layers=46)),
    "gemma3": Variant("gemma3", "Gemma 3 of 270M and 1B", "gemma3_text",
                      _gemma(128, layers=6, hidden=WIDE) | _gemma3({}), WIDE),
    "gemma3-4b": Variant("gemma3", "Gemma 3 of 4B and 12B", "gemma3_text",
                         _gemma(32, layers=6) | _gemma3(_LINEAR)),
    "gemma3-27b": Variant("gemma3", "Gemma 3 of 27B", "gemma3_text", _gemma(16, layers=62) | _gemma3(_LINEAR)),
    "gemma3-old": Variant("gemma3", "Gemma 3, converted in 2025", "gemma3_text",
                          _gemma(32, layers=6) | _gemma3(_LINEAR), left_out=_SWA),
    "phi3-mini": Variant("phi3", "Phi-3 mini and medium, 4k", "phi3",
                         {"sliding_window": 64, "original_max_position_embeddings": CONTEXT}, WIDE),
    "phi3-128k": Variant("phi3", "Phi-3 and Phi-3.5, 128k", "phi3", _longrope(1.0) | {"sliding_window": 256}),
    "phi4": Variant("phi3", "Phi-4", "phi3",
                    _rope(250000.0) | {"sliding_window": None, "original_max_position_embeddings": CONTEXT}),
    "phi4-mini": Variant("phi3", "Phi-4-mini", "phi3", _longrope(0.75) | _TIED | {"sliding_window": 512}),
    "qwen2moe": Variant("qwen2moe", "Qwen 1.5 and 2 with experts", "qwen2_moe",
                        _rope(1e6) | _experts(WIDE) | {"shared_expert_intermediate_size": 2 * WIDE}, WIDE),
    "qwen3moe": Variant("qwen3moe", "Qwen 3 with experts", "qwen3_moe",
                        _rope(1e6) | _experts(WIDE) | {"head_dim": 128, "norm_topk_prob": True}, WIDE),
    "qwen3-coder": Variant("qwen3moe", "Qwen 3 Coder", "qwen3_moe",
                           _rope(1e7) | _experts(NARROW) | {"head_dim": 32, "norm_topk_prob": True,
                                                            "shared_expert_intermediate_size": 0}),
    "qwen3moe-yarn": Variant("qwen3moe", "Qwen 3 with experts and YaRN", "qwen3_moe",
                             _rope(1e6, **_YARN) | _experts(NARROW) | {"head_dim": 32, "norm_topk_prob": True}),
    "gpt2": Variant("gpt2", "GPT-2", "gpt2"),
    "lfm2": Variant("lfm2", "LFM2, LFM2.5", "lfm2", _rope(1e6) | _TIED | {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False}),
}  # fmt: skip
"""Variants by a short name."""

FILE_TYPES: dict[str, dict[str, str]] = {
    "F32": {"": "F32"},
    "F16": {"": "F16"},
    "BF16": {"": "BF16"},
    "Q8_0": {"": "Q8_0"},
    "Q4_0": {"token_embd": "Q6_K", "": "Q4_0"},
    "Q4_1": {"": "Q4_1"},
    "Q5_0": {"": "Q5_0"},
    "Q5_1": {"": "Q5_1"},
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"},
    "Q5_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q5_K"},
    "Q6_K": {"": "Q6_K"},
    "Q3_K_M": {"attn_v": "Q5_K", "ffn_down": "Q4_K", "token_embd": "Q6_K", "": "Q3_K"},
    "Q2_K": {"attn_v": "Q3_K", "ffn_down": "Q3_K", "token_embd": "Q6_K", "": "Q2_K"},
    "IQ4_NL": {"token_embd": "Q6_K", "": "IQ4_NL"},
    "IQ4_XS": {"token_embd": "Q6_K", "": "IQ4_XS"},
    "TQ2_0": {"token_embd": "F16", "": "TQ2_0"},
    "MXFP4": {"token_embd": "Q8_0", "": "MXFP4"},
}
"""Types of files: types of tensors by parts of their names, of which the first that fits counts."""
SERVED_IN_BLOCKS = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K"})
