"""Writes transformers' configuration of a GGUF file, by architecture.

Keys that no table reads are refused, because they may change what the model computes. Values that
llama.cpp's converter does not write are those of the published models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import LoadError
from engine.models.gguf.file import GgufFile
from engine.models.gguf.keys import CONVERT_AGAIN, OTHER_FORMAT, Keys
from engine.models.gguf.rope import rope_of, rope_of_phi3

_WIDE_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27 B models, whose attention is scaled otherwise (as llama.cpp does)."""
_SLIDING, _FULL = "sliding_attention", "full_attention"


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return config.json without tokens; raise LoadError for a model not served."""
    read = _TABLES.get(file.architecture)
    if read is None:
        raise LoadError(
            f"{file.path}: GGUF files of the architecture {file.architecture!r} are not served, only those of "
            f"{', '.join(_TABLES)}; {OTHER_FORMAT}"
        )
    keys = Keys(file)
    config = {
        **read(file, keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": vocab_size(file),
        "dtype": "bfloat16",
        "pad_token_id": None,
    }
    keys.expect("attention.causal", (True,), "only models that generate are")
    keys.expect("pooling_type", (0,), "only models that generate are")
    keys.end()
    return config


def vocab_size(file: GgufFile) -> int:
    """Return the number of tokens; raise LoadError if rows have another."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise LoadError(
            f"{file.path}: the file has no tokens (tokenizer.ggml.tokens); choose one that has its tokenizer, or "
            "convert the model again"
        )
    for name in ("token_embd.weight", "output.weight"):
        tensor = file.tensors.get(name)
        if tensor is not None and tensor.shape[0] != len(tokens):
            raise LoadError(f"{file.path}: {name} has {tensor.shape[0]} rows for {len(tokens)} tokens; {CONVERT_AGAIN}")
    return len(tokens)


def _like_llama(file: GgufFile, keys: Keys) -> dict[str, Any]:
    """Return the configuration of the architectures llama, qwen2 and qwen3, which are one decoder.

    llama.cpp names what a file was converted from, and transformers by the biases: q, k and v have
    biases in its Qwen2, and also the output projection in its Llama. So `model_type` follows from
    the tensors; the architecture of the file only says how its rows are ordered.
    """
    config = _decoder(keys)
    model_type, biases = _biases(file)
    window = keys.count("attention.sliding_window", 0, least=0)
    if window:
        model_type = _windowed(file, model_type)
        config["sliding_window"] = window
    for key in ("expert_count", "expert_used_count"):
        keys.expect(key, (0,), f"mixtures of experts of this architecture are not: {OTHER_FORMAT}")
    rope = rope_of(file, keys, config["head_dim"], config["max_position_embeddings"])
    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    named = _named(model_type, f"{classes[model_type]}ForCausalLM")
    return named | config | biases | {"rope_parameters": rope, "hidden_act": "silu"}


def _gemma2(file: GgufFile, keys: Keys) -> dict[str, Any]:
    config = _decoder(keys)
    return {
        **_named("gemma2", "Gemma2ForCausalLM"),
        **config,
        "query_pre_attn_scalar": _scaled_width(file, config),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "rope_parameters": rope_of(file, keys, config["head_dim"], config["max_position_embeddings"]),
    }


def _gemma3(file: GgufFile, keys: Keys) -> dict[str, Any]:
    """Return the configuration of a Gemma 3, of which every sixth layer attends to all positions.

    Scaling counts for these layers. A file without a window has no others.
    """
    config = _decoder(keys)
    full = rope_of(file, keys, config["head_dim"], config["max_position_embeddings"])
    sliding = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    window = keys.count("attention.sliding_window", 0, least=0)
    layers = range(1, config["num_hidden_layers"] + 1)
    capping = None
    if keys.has("final_logit_softcapping"):
        capping = keys.number("final_logit_softcapping")
    return {
        **_named("gemma3_text", "Gemma3ForCausalLM"),
        **config,
        "query_pre_attn_scalar": _scaled_width(file, config),
        "final_logit_softcapping": capping,
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": [_SLIDING if window and layer % 6 else _FULL for layer in layers],
        "rope_parameters": {_SLIDING: sliding, _FULL: full},
    }


def _phi3(file: GgufFile, keys: Keys) -> dict[str, Any]:
    config = _decoder(keys)
    rope = rope_of_phi3(file, keys, config["head_dim"], config["max_position_embeddings"])
    return {
        **_named("phi3", "Phi3ForCausalLM"),
        **config,
        # The converter writes 0 for Phi-4, which has none.
        "sliding_window": keys.count("attention.sliding_window", 0, least=0) or None,
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "rope_parameters": rope,
    }


def _qwen2moe(file: GgufFile, keys: Keys) -> dict[str, Any]:
    return {
        **_named("qwen2_moe", "Qwen2MoeForCausalLM"),
        **_experts(file, keys),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _qwen3moe(file: GgufFile, keys: Keys) -> dict[str, Any]:
    # The converter writes the 0 that Qwen3-Coder has.
    keys.expect("expert_shared_feed_forward_length", (0,), OTHER_FORMAT)
    return {
        **_named("qwen3_moe", "Qwen3MoeForCausalLM"),
        **_experts(file, keys),
        "norm_topk_prob": True,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _experts(file: GgufFile, keys: Keys) -> dict[str, Any]:
    """Return the fields of a decoder with a mixture of experts in every layer."""
    config = _decoder(keys)
    return {
        **config,
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "rope_parameters": rope_of(file, keys, config["head_dim"], config["max_position_embeddings"]),
    }


def _lfm2(file: GgufFile, keys: Keys) -> dict[str, Any]:
    """Return the configuration of an LFM2, whose convolutions have no heads of K and V."""
    num_layers = keys.count("block_count")
    num_kv_heads = keys.counts("attention.head_count_kv", num_layers)
    if len(set(num_kv_heads) - {0}) != 1:
        raise keys.fault("attention.head_count_kv", f"is {num_kv_heads}, which no decoder has; {OTHER_FORMAT}")
    config = _decoder(keys, num_layers)
    return {
        **_named("lfm2", "Lfm2ForCausalLM"),
        **config,
        "num_key_value_heads": max(num_kv_heads),
        "norm_eps": config["rms_norm_eps"],
        "layer_types": [_FULL if heads else "conv" for heads in num_kv_heads],
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "conv_bias": any(".shortconv." in name and name.endswith(".bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": rope_of(file, keys, config["head_dim"], config["max_position_embeddings"]),
    }


def _gpt2(file: GgufFile, keys: Keys) -> dict[str, Any]:
    del file
    heads = keys.count("attention.head_count")
    keys.expect("attention.head_count_kv", (heads,), OTHER_FORMAT)
    return {
        **_named("gpt2", "GPT2LMHeadModel"),
        "n_layer": keys.count("block_count"),
        "n_embd": keys.count("embedding_length"),
        "n_inner": keys.count("feed_forward_length"),
        "n_head": heads,
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
    }


_TABLES: dict[str, Callable[[GgufFile, Keys], dict[str, Any]]] = {
    "llama": _like_llama,
    "qwen2": _like_llama,
    "qwen3": _like_llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "lfm2": _lfm2,
    "gpt2": _gpt2,
}
"""Tables by llama.cpp's names of architectures."""


def _named(model_type: str, model_class: str) -> dict[str, Any]:
    return {"architectures": [model_class], "model_type": model_type}


def _decoder(keys: Keys, num_layers: int = 0) -> dict[str, Any]:
    """Return the fields that all decoders have but GPT-2.

    num_layers: if it has been read.
    """
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    keys.expect("attention.value_length", (head_dim,), "values must be as wide as keys")
    return {
        "num_hidden_layers": num_layers or keys.count("block_count"),
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.count("context_length"),
    }


def _scaled_width(file: GgufFile, config: dict[str, Any]) -> int:
    """Return the width whose root scales the attention of a Gemma."""
    if config["num_hidden_layers"] == _WIDE_LAYERS[file.architecture]:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _biases(file: GgufFile) -> tuple[str, dict[str, bool]]:
    """Return the `model_type`, and the fields that say which layers have biases."""

    def have(*names: str) -> set[bool]:
        return {f"blk.0.{name}.bias" in file.tensors for name in names}

    input_biases, output_biases, mlp_biases = (
        have("attn_q", "attn_k", "attn_v"),
        have("attn_output"),
        have("ffn_gate", "ffn_up", "ffn_down"),
    )
    fault = LoadError(
        f"{file.path}: only some layers have biases, which no decoder of this architecture has; {OTHER_FORMAT}"
    )
    if len(input_biases) + len(mlp_biases) > 2 or (output_biases == {True} and input_biases != {True}):
        raise fault
    has_attention = True in input_biases
    has_all = True in output_biases
    has_mlp = True in mlp_biases
    if file.architecture == "qwen3":
        if has_mlp or has_attention != has_all:
            raise fault
        return "qwen3", {"attention_bias": has_attention}
    if has_attention and not has_all:
        if has_mlp:
            raise fault
        return "qwen2", {}
    return "llama", {"attention_bias": has_all, "mlp_bias": has_mlp}


def _windowed(file: GgufFile, model_type: str) -> str:
    """Return the type of a Llama with a sliding window."""
    if model_type != "llama" or any(name.endswith(".bias") for name in file.tensors):
        raise LoadError(
            f"{file.path}: {file.architecture}.attention.sliding_window is not served for this model; {OTHER_FORMAT}"
        )
    return "mistral"
