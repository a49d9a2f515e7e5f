"""Decides which models our own decoders compute, by config and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from engine.models.gguf.blocks import BlockTensor
from engine.models.quantising import has_scheme, is_plain, is_quantised

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ROPE_TYPES = frozenset({None, "default", "dynamic", "linear", "llama3", "longrope"})
"""Types with one table of frequencies, including types that `rope.py` fixes."""


def may_decode(config: Any) -> bool:
    """Whether the configuration is that of a decoder like Llama without quantisation."""
    return _is_like_llama(config) and getattr(config, "quantization_config", None) is None


def _is_like_llama(config: Any) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _MODEL_TYPES
        and config.hidden_act == "silu"
        and rope.get("rope_type") in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1) == 1
    )


def is_decoder(model: Any) -> bool:
    """Whether a model is a decoder like Llama with plain weights, or with a GGUF file's weights."""
    return may_decode(model.config) and _has_linears(
        model, lambda linear: is_plain(linear) or isinstance(linear.weight, BlockTensor)
    )


def _has_linears(model: Any, is_known: Callable[[Any], bool]) -> bool:
    """Whether a model has the linear layers of a decoder like Llama, all of a known kind.

    Quantised layers are of other classes, or missing, or their weights are.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    are_known = all(type(linear) is nn.Linear and is_known(linear) for linear in linears)
    return are_known and len(linears) == 7 * model.config.num_hidden_layers + 1


def window_of(attention: Any) -> int | None:
    """Return the positions of a layer's sliding window; None for no window."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    return getattr(attention.config, "sliding_window", None)


def is_lean(model: Any) -> bool:
    """Return whether a model is like Llama, without windows or other biases.

    Its linear layers may be quantised by torchao or compressed-tensors.
    """
    return (
        _is_like_llama(model.config)
        and _has_linears(model, lambda layer: is_plain(layer) or has_scheme(layer) or is_quantised(layer.weight))
        and all(window_of(layer.self_attn) is None for layer in model.model.layers)
        and not is_quantised(model.model.embed_tokens.weight)
        and not getattr(model.config, "mlp_bias", False)
        and model.lm_head.bias is None
    )
