"""Decides which models our own decoders compute: decoders like Llama, by their configuration and their modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.models.packing import is_plain

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ROPE_TYPES = frozenset({None, "default", "linear", "llama3"})


def may_decode(config: Any) -> bool:
    """Whether the configuration is that of a decoder like Llama without quantisation."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _MODEL_TYPES
        and config.hidden_act == "silu"
        and rope.get("rope_type") in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1) == 1
        and getattr(config, "quantization_config", None) is None
    )


def is_decoder(model: Any) -> bool:
    """Whether a model is a decoder like Llama."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # Quantised layers are of other classes, or missing; or their weights are.
    return (
        may_decode(model.config)
        and len(linears) == 7 * model.config.num_hidden_layers + 1
        and all(map(is_plain, linears))
    )


def window_of(attention: Any) -> int | None:
    """Return the positions of a layer's sliding window; None for no window."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    return getattr(attention.config, "sliding_window", None)


def is_lean(model: Any) -> bool:
    """Whether a model is a decoder like Llama, without sliding windows, and without biases outside attention."""
    windows = [window_of(layer.self_attn) for layer in model.model.layers] if is_decoder(model) else [0]
    return (
        not any(window is not None for window in windows)
        and not getattr(model.config, "mlp_bias", False)
        and model.lm_head.bias is None
    )
