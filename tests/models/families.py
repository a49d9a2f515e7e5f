"""Tiny models of every family that is served, and of every wrapper, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models.wrappers import WRAPPERS
from engine.start.architectures import FITTING_MODEL_TYPES, RECURRENT_MODEL_TYPES
from engine.start.loading import LoadedModel, load
from engine.start.miniature import LENGTHS, miniature
from engine.start.plain_passes import attention
from tests.engine import tiny
from tests.wrong import instead

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
_SHAPES: dict[str, dict[str, Any]] = {
    "gemma3n_text": _SHARED_KV | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "gemma4_text": GEMMA_4_SMALL,
    "mimo_v2_flash": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "head_dim": 16,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "adapter_rank": 4,
        "chunk_size": 8,
    },
}
"""Fields of types whose layers have several shapes or share blocks; a miniature has few layers."""
_WINDOWED = {"use_sliding_window": True, "sliding_window": LENGTHS["sliding_window"]}
_CONVOLVED = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "lfm2": _CONVOLVED,
    "lfm2_moe": _CONVOLVED,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    "phimoe": _WINDOWED,
    "qwen2": _WINDOWED | {"max_window_layers": 1},
    "qwen2_moe": _WINDOWED,
    "qwen3": _WINDOWED | {"max_window_layers": 1},
    "qwen3_moe": _WINDOWED,
}
"""Fields that a family's own defaults leave off, so that every length-like field has an effect."""
NAMES = sorted(FITTING_MODEL_TYPES)
PLACEHOLDERS = {"image": 90, "video": 91}
FIRST_PLACEHOLDER = min(PLACEHOLDERS.values())
_ENCODER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "hidden_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim", "projection_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "depth", "mlp_ratio"), 1),
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "pixel_shuffle_ratio": 0.5,
    "head_dim": 16,
}


class Family(NamedTuple):
    """A tiny model as it is served, and transformers' greedy continuation of a prompt."""

    loaded: LoadedModel
    generated: Callable[[list[int], int], list[int]]


def config(name: str, **more: Any) -> Any:
    """Return the configuration of a small model by its `model_type`.

    more: fields that differ.
    """
    if name in _SHAPES:
        fields = SIZES | {"initializer_range": 0.3} | _SHAPES[name] | more
        return transformers.AutoConfig.for_model(name, **fields)
    small = miniature(transformers.AutoConfig.for_model(name, **_MORE.get(name, {})))
    for field, value in more.items():
        setattr(small, field, value)
    return small


def family(name: str, seed: int = 3, **lengths: int) -> LoadedModel:
    """Return a model by its `model_type`, as it would be loaded.

    lengths: fields that differ, if the type has them.
    """
    small = config(name)
    for field, length in lengths.items():
        if getattr(small, field, None):
            setattr(small, field, length)
    return tiny.load_model(small, seed)


def family_or_wrapper(name: str, folder: Path) -> Family:
    """Return a tiny model by its `model_type`; a wrapper's checkpoint is written into a folder."""
    if name not in WRAPPERS:
        loaded = family(name)
        return Family(loaded, lambda prompt, count: generated(loaded, prompt, count))
    wrapper = write_wrapper(name, folder)
    loaded = load(str(folder), None, "float32", torch.device("cpu"))
    banned = list(loaded.placeholder_ids)
    return Family(loaded, lambda prompt, count: _continued(wrapper, prompt, count, banned))


def write_wrapper(name: str, folder: Path, image_token: int = PLACEHOLDERS["image"], **text: Any) -> Any:
    """Write the checkpoint of a tiny wrapper, as transformers does; return the wrapper.

    text: fields of the text model's configuration.
    """
    torch.manual_seed(3)
    config = wrapper_config(name, PLACEHOLDERS | {"image": image_token}, text)
    with instead(transformers.AutoModel, "from_config", _part):
        wrapper = _model_class(config).from_config(config, attn_implementation="eager").float().eval()
    wrapper.generation_config.eos_token_id = None
    wrapper.save_pretrained(folder)
    if name == "kimi_k25":
        _name_as_published(folder / "model.safetensors")
    return wrapper


def _part(from_config: Callable[..., Any], config: Any, **options: Any) -> Any:
    """Return a part of a wrapper; an encoder that needs a further package is left out."""
    return torch.nn.Identity() if config.model_type == "gemma3n_vision" else from_config(config, **options)


def _name_as_published(file: Path) -> None:
    """Undo a renaming of the encoder's blocks, which transformers also applies to the text."""
    names = load_file(file)
    save_file(
        {name.replace("language_model.model.blocks.", "language_model.model.layers."): names[name] for name in names},
        file,
    )


def _model_class(config: Any) -> Any:
    if type(config) in transformers.AutoModelForImageTextToText._model_mapping:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def wrapper_config(name: str, placeholders: dict[str, int], more: dict[str, Any]) -> Any:
    """Return the configuration of a tiny wrapper."""
    base = transformers.AutoConfig.for_model(name)
    inner = base.get_text_config()
    if inner is base:
        return miniature(base)
    if inner.model_type in RECURRENT_MODEL_TYPES:
        inner = transformers.AutoConfig.for_model(inner.model_type, **_MORE.get(inner.model_type, {}))
    text = _text_fields(name, inner) | more
    encoder_type = base.vision_config.model_type if base.vision_config else f"{name}_vision"
    encoder = _ENCODER | {"model_type": encoder_type}
    if encoder_type == "radio":
        encoder |= {"mlp_ratio": 1.0, "video_temporal_patch_size": 2}
    tokens = {f"{kind}_token_{ending}": token for kind, token in placeholders.items() for ending in ("id", "index")}
    tokens = {field: token for field, token in tokens.items() if hasattr(base, field)}
    return transformers.AutoConfig.for_model(
        name, text_config=text, vision_config=encoder, tie_word_embeddings=False, downsample_factor=1, **tokens
    )


def _text_fields(name: str, inner: Any) -> dict[str, Any]:
    shapes = _SHAPES.get(inner.model_type)
    fields: dict[str, Any] = SIZES | shapes | {"model_type": inner.model_type} if shapes else miniature(inner).to_dict()
    fields |= {"eos_token_id": None, "pad_token_id": 0}
    rope = dict(fields.get("rope_parameters") or {})
    if WRAPPERS[name]:
        rope.pop("xdrope_section", None)
        sections = {"xdrope_section": [1, 1, 1, 1]} if name == "hunyuan_vl" else {"mrope_section": [1, 1, 2]}
        fields["rope_parameters"] = rope | {"rope_type": "default", "rope_theta": 10000.0} | sections
    if name.startswith("glm"):
        fields["head_dim"] = 16 if name == "glm4v_moe" else 8
        fields["rope_parameters"]["partial_rotary_factor"] = 0.5 if name == "glm4v_moe" else 1.0
    return fields


def _continued(model: Any, prompt: list[int], count: int, banned: list[int] | None = None) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            use_cache=True,
            suppress_tokens=banned,
        )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def generated(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Return the continuation by transformers itself."""
    with attention(loaded.model, "eager"):
        return _continued(loaded.model, prompt, count)
