"""Writes the configuration that transformers would have of a GGUF file of the architectures llama,
qwen2 and qwen3.

All three are one decoder. llama.cpp names what a file was converted from, and transformers by the
biases: q, k and v have biases in its Qwen2, and also the output projection in its Llama. So
`model_type` follows from the tensors; the architecture of the file only says how its rows are
ordered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.quants import dequantize

from engine.errors import LoadError
from engine.models.gguf.file import GgufFile
from engine.models.gguf.keys import Keys

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_FACTORS = "rope_freqs.weight"
_PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of the published models of Llama 3.1 to 3.3."""
_CLOSE = 1e-5
_TRANSFORMERS = "serve the same model in transformers format"


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the content of config.json, without its tokens; raise LoadError for a model that would
    be served wrongly.

    file: of an architecture in `ARCHITECTURES`.
    """
    keys = Keys(file)
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = _head_dim(keys, hidden, heads)
    model_type, biases = _biases(file)
    context = keys.count("context_length")
    config = {
        "num_hidden_layers": keys.count("block_count"),
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "rope_parameters": _rope(file, keys, head_dim, context),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": vocab_size(file),
        "dtype": "bfloat16",
        **biases,
    }
    if keys.has("attention.sliding_window"):
        model_type = _windowed(file, model_type)
        config["sliding_window"] = keys.count("attention.sliding_window")
    keys.expect("attention.causal", (True,), "only models that generate are")
    for key in ("expert_count", "expert_used_count"):
        keys.expect(key, (0,), f"mixtures of experts in GGUF files are not: {_TRANSFORMERS}")
    keys.expect("pooling_type", (0,), "only models that generate are")
    keys.end()
    return {"architectures": [f"{_CLASSES[model_type]}ForCausalLM"], "model_type": model_type, **config}


def vocab_size(file: GgufFile) -> int:
    """Return the number of tokens; raise LoadError if it is not that of the embeddings' and the
    head's rows.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise LoadError(
            f"{file.path}: the file has no tokens (tokenizer.ggml.tokens); download one that has its tokenizer, or "
            "convert the model again"
        )
    for name in ("token_embd.weight", "output.weight"):
        tensor = file.tensors.get(name)
        if tensor is not None and tensor.shape[0] != len(tokens):
            raise LoadError(
                f"{file.path}: {name} has {tensor.shape[0]} rows for {len(tokens)} tokens; download the file again, or "
                "convert the model again"
            )
    return len(tokens)


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    """Return the width of a head, of which all numbers are rotated."""
    head_dim = keys.count("attention.key_length", hidden // heads)
    keys.expect("attention.value_length", (head_dim,), "values must be as wide as keys")
    keys.expect("rope.dimension_count", (head_dim,), "all numbers of a head must be rotated")
    return head_dim


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
        f"{file.path}: only some layers have biases, which no decoder of this architecture has; {_TRANSFORMERS}"
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
            f"{file.path}: {file.architecture}.attention.sliding_window is not served for this model; {_TRANSFORMERS}"
        )
    return "mistral"


def _rope(file: GgufFile, keys: Keys, head_dim: int, context: int) -> dict[str, Any]:
    """Return the parameters of the rotary embedding."""
    theta = keys.number("rope.freq_base", 10000.0)
    scaling = _scaling(keys, context)
    factors = file.tensors.get(_FACTORS)
    if factors is None:
        return {"rope_theta": theta, **scaling}
    numbers = dequantize(factors.data, factors.type).astype(np.float64)
    if np.all(numbers == 1):
        return {"rope_theta": theta, **scaling}
    llama3 = None
    if scaling["rope_type"] == "default":
        llama3 = llama3_scaling(numbers, theta, head_dim)
    if llama3 is None:
        raise LoadError(
            f"{file.path}: the factors of its rotary embedding ({_FACTORS}) are not those of a Llama 3.1 model; "
            f"{_TRANSFORMERS}"
        )
    return {"rope_theta": theta, "rope_type": "llama3", **llama3}


def _scaling(keys: Keys, context: int) -> dict[str, Any]:
    """Return the scaling that the file's keys name, as llama.cpp reads them."""
    old = keys.number("rope.scale_linear", 1.0)
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", old)
    original = keys.count("rope.scaling.original_context_length", context)
    if kind != "yarn":
        keys.expect("rope.scaling.attn_factor", (1.0,), _TRANSFORMERS)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.fault("rope.scaling.type", f"is {kind!r}; linear and yarn are served: {_TRANSFORMERS}")
    keys.expect("rope.scaling.yarn_ext_factor", (1.0,), _TRANSFORMERS)
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if attention != 1:
        yarn["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    return yarn


def llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return transformers' parameters of the type llama3 for the divisors of the frequencies that a
    file has; None if there are none.

    Only the quotients of the parameters count, so three unknown numbers follow from two divisors
    between the extremes: between them, the weight of the plain frequency is linear in the
    frequency.
    """
    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors)) or factors.min() < 1:
        return None
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    largest = float(factors.max())
    candidates = [{"factor": largest, **_PUBLISHED}]
    between = (factors > 1 + _CLOSE) & (factors < largest * (1 - _CLOSE))
    if between.sum() >= 2:
        shares = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        slope, start = np.polyfit(frequencies[between] / (2 * math.pi), shares, 1)
        original = int(_PUBLISHED["original_max_position_embeddings"])
        width = original / slope
        low, high = -start * width, -start * width + width
        fitted = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
        candidates.append({"factor": largest, **fitted})
    for scaling in candidates:
        if np.allclose(_divisors(scaling, frequencies), factors, rtol=_CLOSE, atol=0):
            return scaling
    return None


def _divisors(scaling: Mapping[str, float], frequencies: np.ndarray) -> np.ndarray:
    """Return the divisors of frequencies by llama3's parameters, as llama.cpp's converter writes
    them.
    """
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - share) / factor + share)
    return divisors
