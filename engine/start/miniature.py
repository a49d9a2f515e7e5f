"""Miniatures of models: the same class and layer types, with few numbers and random weights.

All lengths in a miniature's configuration (windows, chunks, floors) are shorter than the probe's
text. So the probe of a miniature compares what a model does with long texts, which the probe of the
model itself does not reach.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine.attention.attention import HOOK
from engine.errors import LoadError, first_line
from engine.models.importing import import_transformers
from engine.start.loading import LoadedModel, adopt
from engine.start.probe import find_kv_shape, probe

log = logging.getLogger("polydraft")

LENGTHS = {
    "sliding_window": 6,
    "attention_chunk_size": 6,
    "local_attention": 6,
    "floor_scale": 5,
    "index_topk": 8,
    "index_block_size": 4,
    "window_size": 6,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
}
"""Fields of configurations that are lengths, and their values in a miniature."""
_ROPE_LENGTHS = {"original_max_position_embeddings": 10}
_MOST_POSITIONS = 256
_VOCABULARY = 101
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER, _EXPERTS, _EXPERT_INNER = 32, 4, 2, 8, 48, 4, 16
_WIDE = 2 * _WIDTH
_STATE, _RANK, _STATE_HEADS = 8, 4, 8
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "kv_n_heads"), _KV_HEADS),
    **dict.fromkeys(("head_dim", "global_head_dim", "hidden_size_per_layer_input", "laurel_rank"), _HEAD_DIM),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "dff", "intermediate_size_mlp", "ffn_hidden_size"), _INNER
    ),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        _EXPERTS,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "expert_dim"),
        _EXPERT_INNER,
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), _MOST_POSITIONS),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    "query_pre_attn_scalar": _HEAD_DIM,
}
_RECURRENT_SIZES: dict[str, Any] = {
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), _WIDE // _STATE_HEADS),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"), _STATE_HEADS),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), _STATE),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), _WIDE),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "adapter_rank"), _RANK),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups", "num_expert_group"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    "attention_head_dim": _WIDE // _HEADS,
    "linear_num_key_heads": 2,
    "moe_shared_expert_intermediate_size": _EXPERT_INNER,
}
"""Sizes of recurrent layers and of the attention next to them; both widen the stream by two."""
_LATENT_SIZES: dict[str, Any] = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim"), 4),
    "num_key_value_heads": _HEADS,
    "qk_nope_head_dim": _HEAD_DIM,
    "qk_head_dim": _HEAD_DIM + 4,
    "v_head_dim": 6,
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_NUMBERS = ("moe_layers", "mlp_only_layers", "attn_layer_indices")
"""Lists of the numbers of some layers."""
_LEFT_OUT = ("quantization_config", "transformers_version", "architectures", "dtype", "model_type", "hybrid_layer_ids")
_TOKENS = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": None}
_FEWEST_LAYERS = 2


def check_long_texts(loaded: LoadedModel, only_warns: bool) -> None:
    """Probe the miniature of a model that runs in transformers' code; raise LoadError if it fails.

    only_warns: log a warning instead.
    """
    try:
        small = _random_model(miniature(loaded.model.config), f"{loaded.name} (miniature)")
        shape = find_kv_shape(small)
    except Exception as error:  # fields of a configuration may fit no small sizes
        log.warning("%s: what depends on a text's length was not compared: %s", loaded.name, first_line(error))
        return
    try:
        probe(small, shape)
    except LoadError as error:
        fault = f"{loaded.name}: texts longer than its windows or chunks would get wrong answers ({error})"
        if not only_warns:
            raise LoadError(fault) from error
        log.warning("%s", fault)


def _random_model(config: Any, name: str) -> LoadedModel:
    """Return a model with random weights in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = import_transformers().AutoModelForCausalLM
        return adopt(models.from_config(config, attn_implementation=HOOK, dtype=torch.float32), name)


def miniature(config: Any) -> Any:
    """Return the configuration of a model's miniature; raise an exception if there is none."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _LEFT_OUT}
    sizes = _sizes(fields)
    lengths = {key: value for key, value in LENGTHS.items() if fields.get(key)}
    layers = _layers(config, fields)
    rope = _shortened(fields.get("rope_parameters"))
    changed = fields | sizes | lengths | layers | _TOKENS
    if rope is not None:
        changed["rope_parameters"] = rope
    return import_transformers().AutoConfig.for_model(config.model_type, **changed)


def _sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """Return small sizes for fields of a configuration, and of the parts of its layers in it."""
    sizes = {key: value for key, value in (_SIZES | _RECURRENT_SIZES).items() if key in fields}
    if fields.get("kv_lora_rank"):
        sizes |= {key: value for key, value in _LATENT_SIZES.items() if fields.get(key)}
    for name, part in fields.items():
        if name.endswith("_config") and isinstance(part, dict):
            sizes[name] = part | _sizes(part)
    return sizes


def _layers(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and lists with an entry for each, so that every type occurs."""
    named = next((name for name in _LAYERS if isinstance(fields.get(name), int)), "num_hidden_layers")
    count = int(getattr(config, named))
    lists: dict[str, list[Any]] = {}
    numbers: dict[str, list[int]] = {}
    for key, value in fields.items():
        if key in _LAYER_NUMBERS and isinstance(value, list):
            numbers[key] = value
        elif isinstance(value, list) and len(value) == count:
            lists[key] = value
    parts = {int(number): part for number, part in (fields.get("per_layer_config") or {}).items()}
    first_shared = count - (fields.get("num_kv_shared_layers") or 0)
    kinds: dict[str, int] = {}
    for number in range(count):
        kind = [number >= first_shared, *(value[number] for value in lists.values())]
        kind += [number in value for value in numbers.values()]
        kinds.setdefault(repr((kind, parts.get(number))), number)
    chosen = sorted({*kinds.values(), *range(min(_FEWEST_LAYERS, count))})
    result: dict[str, Any] = {key: [value[number] for number in chosen] for key, value in lists.items()}
    for key, value in numbers.items():
        result[key] = [number for number, old in enumerate(chosen) if old in value]
    result[named] = len(chosen)
    if "num_kv_shared_layers" in fields:
        result["num_kv_shared_layers"] = sum(number >= first_shared for number in chosen)
    if parts:
        small = {number: parts.get(old) for number, old in enumerate(chosen)}
        result["per_layer_config"] = {number: part | _sizes(part) for number, part in small.items() if part}
    return result


def _shortened(rope: Any) -> Any:
    """Return rotary parameters whose original lengths are short, and whose factors fit the head."""
    if not isinstance(rope, dict):
        return rope
    result = {key: _shortened(value) for key, value in rope.items()}
    for key, length in _ROPE_LENGTHS.items():
        if result.get(key) is not None:
            result[key] = length
    return result
