"""Reads the rotary embedding of a GGUF file, as transformers' parameters.

A file has the frequencies' base, a scaling by name, and tensors with the divisors of single
frequencies. Llama 3.1 has one such tensor, Phi-3 one for short and one for long texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.quants import dequantize

from engine.errors import LoadError
from engine.models.gguf.file import GgufFile
from engine.models.gguf.keys import CONVERT_AGAIN, OTHER_FORMAT, Keys

FACTORS, LONG, SHORT = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))
"""Tensors with the divisors of the frequencies."""
_PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of the published models of Llama 3.1 to 3.3."""
_CLOSE = 1e-5


def rope_of(file: GgufFile, keys: Keys, head_dim: int, context: int) -> dict[str, Any]:
    """Return the parameters of an embedding that rotates all numbers of a head."""
    keys.expect("rope.dimension_count", (head_dim,), "all numbers of a head must be rotated")
    theta = keys.number("rope.freq_base", 10000.0)
    scaling = _scaling(keys, context)
    factors = _divisors_of(file, FACTORS)
    if factors is None or np.all(factors == 1):
        return {"rope_theta": theta, **scaling}
    llama3 = None
    if scaling["rope_type"] == "default":
        llama3 = llama3_scaling(factors, theta, head_dim)
    if llama3 is None:
        raise LoadError(
            f"{file.path}: the factors of its rotary embedding ({FACTORS}) are not those of a Llama 3.1 model; "
            f"{OTHER_FORMAT}"
        )
    return {"rope_theta": theta, "rope_type": "llama3", **llama3}


def rope_of_phi3(file: GgufFile, keys: Keys, head_dim: int, context: int) -> dict[str, Any]:
    """Return the parameters of Phi-3's embedding, which may rotate a part of a head.

    Models with a longer context than their original one have two tensors of divisors.
    """
    num_rotated = keys.count("rope.dimension_count", head_dim)
    share = num_rotated / head_dim
    if share > 1 or num_rotated % 2 or int(share * head_dim) != num_rotated:  # as transformers counts them
        raise keys.fault("rope.dimension_count", f"is {num_rotated} of {head_dim} numbers of a head; {OTHER_FORMAT}")
    rope: dict[str, Any] = {
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": share,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length", context),
    }
    keys.expect("rope.scaling.type", ("none", "longrope"), OTHER_FORMAT)
    divisors = {"long_factor": _divisors_of(file, LONG), "short_factor": _divisors_of(file, SHORT)}
    if all(factors is None for factors in divisors.values()):
        if rope["original_max_position_embeddings"] < context:
            raise LoadError(
                f"{file.path}: the file has no factors of its rotary embedding ({LONG}), which a context of {context} "
                f"tokens needs; {CONVERT_AGAIN}"
            )
        return {"rope_type": "default", **rope}
    for field, factors in divisors.items():
        if factors is None or factors.shape != (num_rotated // 2,) or not np.all(np.isfinite(factors) & (factors > 0)):
            raise LoadError(
                f"{file.path}: the file does not have {num_rotated // 2} positive numbers of {field} of its rotary "
                f"embedding; {CONVERT_AGAIN}"
            )
        rope[field] = [float(str(np.float32(factor))) for factor in factors]
    rope["factor"] = context / rope["original_max_position_embeddings"]
    return {"rope_type": "longrope", **rope, "attention_factor": keys.number("rope.scaling.attn_factor")}


def _divisors_of(file: GgufFile, name: str) -> np.ndarray | None:
    """Return the numbers of a tensor; None if the file does not have it."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    numbers: np.ndarray = dequantize(tensor.data, tensor.type).astype(np.float64)
    return numbers


def _scaling(keys: Keys, context: int) -> dict[str, Any]:
    """Return the scaling that the file's keys name, as llama.cpp reads them."""
    old = keys.number("rope.scale_linear", 1.0, zero=1.0)
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", old, zero=1.0)
    original = keys.count("rope.scaling.original_context_length", context)
    if kind != "yarn":
        keys.expect("rope.scaling.attn_factor", (1.0,), OTHER_FORMAT)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.fault("rope.scaling.type", f"is {kind!r}; linear and yarn are served: {OTHER_FORMAT}")
    keys.expect("rope.scaling.yarn_ext_factor", (1.0,), OTHER_FORMAT)
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    logarithms = keys.number("rope.scaling.yarn_log_multiplier", 0.0, zero=0.0)
    if attention != 1 or logarithms:
        length = math.log(max(1.0, factor))
        yarn["attention_factor"] = attention * (1 + 0.1 * length) / (1 + 0.1 * logarithms * length)
    return yarn


def llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return transformers' parameters of llama3 for a file's divisors, or None.

    Only the quotients of the parameters count, so three unknown numbers follow from two
    divisors between the extremes: between them, the weight of the plain frequency is
    linear in the frequency.
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
    """Return divisors by llama3's parameters, as llama.cpp's converter does."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: np.ndarray = 1 / ((1 - share) / factor + share)
    return divisors
