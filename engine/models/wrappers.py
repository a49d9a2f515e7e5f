"""Text models of multimodal checkpoints: their configurations, and the names of their weights.

A wrapper is a checkpoint whose config.json nests the text model's configuration. Its text model is
served as an ordinary model, and the encoders of images, videos and audio are never loaded. Several
text models differ from a plain family in their positions of images alone, so they are served as
this family. Not for: encoders, and text models that compute something else.
"""

from __future__ import annotations

import re
from typing import Any

from engine.errors import ConfigError
from engine.models.files import inner_object
from engine.models.importing import import_transformers

SAME_TYPE = ""
"""Served text types of a wrapper whose text model is served by its own type."""
WRAPPERS = {
    **dict.fromkeys(
        """
        aya_vision cohere2_vision deepseek_vl exaone4_5 gemma3 gemma3n gemma4 gemma4_unified got_ocr2 idefics3
        internvl kimi_k25 lfm2_vl lfm3_vl lighton_ocr llama4 llava llava_next llava_onevision minicpm_ocr minicpmv4_6
        minicpmv4_7 mistral3 nemotron_h_omni paligemma qwen3_5 qwen3_5_moe smolvlm video_llama_3
        """.split(),
        SAME_TYPE,
    ),
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "glm4v": "glm4",
    "glm46v": "glm4",
    "glmga": "glm4",
    "glm4v_moe": "glm4_moe",
    "hunyuan_vl": "hunyuan_v1_dense",
    "phi4_multimodal": "phi3",
}
"""Served wrappers by `model_type`, and the family that their text model is served as."""
_ROUTERS = {"qwen3_moe": {"norm_topk_prob": True}}
"""Fields of a plain family that the text models of its wrappers fix in their code."""
_MROPE = ("mrope_section", "mrope_interleaved", "xdrope_section")
"""Fields of rotary embeddings by rows of positions, which are equal for text."""
KEY_MAPPING = {
    r"^(model\.)?(language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(model\.)?(language_model|text_model)\.model\.": "model.",
    r"^(model\.)?(language_model|text_model)\.": "model.",
}
"""Names of a text model's tensors in a wrapper, and in the plain model."""
_BEGINNINGS = ("model.language_model.", "language_model.model.", "model.text_model.", "language_model.")
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_TEXT_PART = re.compile("language_model|text_model")
_PATTERN = "re:"
"""Beginning of a pattern of compressed-tensors, among names of modules."""
_MODULE_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "targets", "llm_int8_skip_modules")


def text_config(name: str, config: Any) -> Any:
    """Return the configuration of a wrapper's text model; that of another model as it is.

    Raise ConfigError if the quantisation of the wrapper cannot be read for the text model alone.
    """
    family = WRAPPERS.get(config.model_type)
    if family is None:
        return config
    inner = config.get_text_config()
    if family != SAME_TYPE:
        inner = _as_family(family, inner)
    inner.tie_word_embeddings = bool(config.tie_word_embeddings)
    for field in ("dtype", "eos_token_id", "bos_token_id"):
        if getattr(config, field, None) is not None:
            setattr(inner, field, getattr(config, field))
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        stored = stored if isinstance(stored, dict) else stored.to_dict()
        inner.quantization_config = _unwrapped_modules(name, stored)
    inner.wrapper_type = config.model_type
    inner.placeholder_token_ids = _placeholders(config, inner.vocab_size)
    return inner


def wrapper_of(config: Any) -> str:
    """Return the type of the wrapper that a text model's configuration comes from, or ""."""
    return str(getattr(config, "wrapper_type", ""))


def placeholders_of(config: Any) -> tuple[int, ...]:
    """Return the tokens that stand for images, videos and audio in a wrapper's prompts."""
    return tuple(getattr(config, "placeholder_token_ids", ()))


def text_object(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a wrapper's text model in config.json, or of another model."""
    family = WRAPPERS.get(str(raw.get("model_type")))
    inner = inner_object(raw)
    if family is None or inner is None:
        return raw
    quantised = {"quantization_config": raw["quantization_config"]} if "quantization_config" in raw else {}
    return {**inner, **quantised, "model_type": family or inner.get("model_type")}


def plain_name(name: str) -> str:
    """Return the plain model's name of a wrapper's tensor or module."""
    dotted = f"{name}."
    for pattern, replacement in KEY_MAPPING.items():
        changed = re.sub(pattern, replacement, dotted)
        if changed != dotted:
            return changed[:-1]
    return name


def _as_family(family: str, inner: Any) -> Any:
    """Return the configuration of a plain family that computes the same for text."""
    stored = inner.to_dict()
    left_out = ("model_type", "transformers_version", "architectures")
    fields = {key: value for key, value in stored.items() if key not in left_out and not key.endswith("_config")}
    rope = {key: value for key, value in (fields.get("rope_parameters") or {}).items() if key not in _MROPE}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    fields |= {"rope_parameters": rope, **_ROUTERS.get(family, {})}
    return import_transformers().AutoConfig.for_model(family, **fields)


def _placeholders(config: Any, vocab_size: int) -> list[int]:
    encoders = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    tokens = set()
    for part in (config, *encoders):
        names = {**getattr(part, "attribute_map", {}), **getattr(part, "__dict__", {})}
        tokens |= {getattr(part, name, None) for name in names if _PLACEHOLDER.fullmatch(name)}
    return sorted(token for token in tokens if isinstance(token, int) and 0 <= token < vocab_size)


def _unwrapped_modules(name: str, stored: Any) -> Any:
    """Return a quantisation whose module names are the text model's."""
    if isinstance(stored, list):
        return [_unwrapped_modules(name, value) for value in stored]
    if not isinstance(stored, dict):
        return stored
    result = {key: _unwrapped_modules(name, value) for key, value in stored.items()}
    for field in _MODULE_LISTS:
        if isinstance(stored.get(field), list):
            result[field] = [plain_module(name, field, module) for module in stored[field]]
    return result


def wrapped_names(name: str) -> list[str]:
    """Return a plain model's name of a tensor, and its names in wrappers."""
    rest = name.removeprefix("model.")
    return [name, *(f"{begin}{rest}" for begin in _BEGINNINGS)]


def plain_module(name: str, field: str, module: Any) -> Any:
    """Return a module's name, or a pattern of names, in the text model; others as they are.

    Raise ConfigError for a pattern that cannot be translated. field: its place, for a message.
    """
    if not isinstance(module, str) or not _TEXT_PART.search(module):
        return module
    mark = _PATTERN if module.startswith(_PATTERN) else ""
    plain = mark + plain_name(module.removeprefix(mark).replace(r"\.", "."))
    if _TEXT_PART.search(plain):
        raise ConfigError(
            f"{name}: {field} has {module!r}, a pattern of the whole wrapper's modules; name modules of the text model "
            "instead, such as lm_head or model.layers.0.self_attn"
        )
    return plain
