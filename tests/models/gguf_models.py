"""Writes small GGUF models: random weights, and the embedded pair's tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

DEMO = Path(__file__).resolve().parents[2] / "server" / "demo" / "target"
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, CONTEXT = 2, 4, 2, 512
TYPES_IN_THE_GATE = {"Q4_1", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
"""Types of blocks by forms of scales.

A scale, a scale and a minimum, and records with and without minima. A product is compiled for each
type; Q5_0 shares that of Q8_0.
"""
_SPREAD = 0.3
"""Standard deviation of all weights."""
_SCALES: Mapping[str, tuple[int, float, int, float]] = {
    # Byte of the block's scale, the standard deviation of its weights at scale 1; the same for its
    # minimum, as the multiple of the scale at which weights are 0 in the mean.
    "Q2_K": (80, 14.0, 82, 1.5),
    "Q3_K": (108, 43.0, 0, 0.0),
    "Q4_K": (0, 260.0, 2, 7.5),
    "Q5_K": (0, 520.0, 2, 15.5),
    "Q6_K": (208, 1370.0, 0, 0.0),
    "IQ4_NL": (0, 70.0, 0, 0.0),
    "IQ4_XS": (0, 1300.0, 0, 0.0),
}


@cache
def tokenizer_keys() -> dict[str, Any]:
    """Key-values of the embedded pair's tokenizer, as llama.cpp's converter would write them."""
    stored = json.loads((DEMO / "tokenizer.json").read_text())
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    control = {one["content"] for one in stored["added_tokens"]}
    types = [int(gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL) for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": (DEMO / "chat_template.jinja").read_text(),
    }


def stored_weight(
    random: np.random.Generator, shape: tuple[int, ...], kind: str, numbers: np.ndarray | None = None
) -> np.ndarray:
    """Weights in blocks of a type, as bytes [N, bytes of a row]; shape: (N, K).

    numbers: of the weights; random ones by default, and for types that cannot be written.
    """
    if kind not in _SCALES:
        if numbers is None:
            numbers = random.normal(0, _SPREAD, shape).astype(np.float32)
        return gguf.quants.quantize(numbers, GGMLQuantizationType[kind])
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (math.prod(shape) // block, size), dtype=np.uint8)
    at, spread, at_minimum, multiple = _SCALES[kind]
    scale = random.uniform(0.5, 1.5, len(blocks)) * _SPREAD / spread
    blocks[:, at : at + 2] = scale.astype("<f2")[:, None].view(np.uint8)
    if multiple:
        minimum = scale * multiple
        blocks[:, at_minimum : at_minimum + 2] = minimum.astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _shapes(architecture: str, hidden: int, vocab_size: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights and norms, in torch's order."""
    head_dim, inner = head_dim_of(architecture, hidden), 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, hidden)}
    for layer in range(NUM_LAYERS):
        layer_shapes = {
            "attn_norm": (hidden,),
            "attn_q": (NUM_HEADS * head_dim, hidden),
            "attn_k": (NUM_KV_HEADS * head_dim, hidden),
            "attn_v": (NUM_KV_HEADS * head_dim, hidden),
            "attn_output": (hidden, NUM_HEADS * head_dim),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        if architecture == "qwen3":
            layer_shapes |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()}
    shapes["output_norm.weight"] = (hidden,)
    return shapes if tied else {**shapes, "output.weight": (vocab_size, hidden)}


def head_dim_of(architecture: str, hidden: int) -> int:
    """Return a head's width; qwen3's is not the hidden size divided by the heads."""
    return hidden // NUM_HEADS * (2 if architecture == "qwen3" else 1)


def _model_keys(architecture: str, hidden: int, vocab_size: int) -> dict[str, Any]:
    head_dim = head_dim_of(architecture, hidden)
    own = {
        "context_length": CONTEXT,
        "embedding_length": hidden,
        "block_count": NUM_LAYERS,
        "feed_forward_length": 2 * hidden,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "vocab_size": vocab_size,
    }
    if architecture == "llama":
        own["rope.dimension_count"] = head_dim
    if architecture == "qwen3":
        own |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    keys = {f"{architecture}.{key}": value for key, value in own.items()}
    return {"general.name": f"random {architecture}", **keys}


def write_model(
    path: Path,
    architecture: str = "llama",
    types: str | Mapping[str, str] = "Q8_0",
    *,
    tied: bool = True,
    biases: bool | None = None,
    parts: int = 1,
    changes: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model and return its file, or the first of its parts.

    architecture: llama, qwen2 or qwen3. types: of all weights but norms and biases, or by parts of
    their names, of which the first that fits counts ("" fits all). The hidden size is 256 if a type
    has blocks of 256, else 64. biases: of q, k and v; by default qwen2 has them. changes:
    key-values and tensors (float32 arrays) in place of those that would be written, or as further
    ones; None leaves one out.
    """
    types = {"": types} if isinstance(types, str) else types
    has_large_blocks = any(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 256 for kind in types.values())
    hidden, random = 256 if has_large_blocks else 64, np.random.default_rng(seed)
    tokens = tokenizer_keys()
    num_tokens = len(tokens["tokenizer.ggml.tokens"])
    keys = {**_model_keys(architecture, hidden, num_tokens), **tokens}
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for name, shape in _shapes(architecture, hidden, num_tokens, tied).items():
        if len(shape) == 1:
            tensors[name] = random.normal(1, 0.1, shape).astype(np.float32), "F32"
            continue
        kind = next(kind for part, kind in types.items() if part in name)
        tensors[name] = stored_weight(random, shape, kind), kind
        if (architecture == "qwen2" if biases is None else biases) and any(f"attn_{one}." in name for one in "qkv"):
            bias = random.normal(0, _SPREAD, shape[:1]).astype(np.float32)
            tensors[name.replace(".weight", ".bias")] = bias, "F32"
    for name, value in (changes or {}).items():
        if isinstance(value, np.ndarray):
            tensors[name] = value, "F32"
        elif value is None:
            keys.pop(name, None), tensors.pop(name, None)
        else:
            keys[name] = value
    return write_file(path, architecture, keys, tensors, parts)


def write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str]],
    parts: int = 1,
) -> Path:
    """Write key-values (None is left out) and tensors; return the first part."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-len(tensors) // parts) if parts > 1 else 0)
    for key, value in keys.items():
        if value is not None:
            _add(writer, key, value)
    for name, (tensor, kind) in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    names = writer.format_shard_names(path)
    writer.close()
    return names[0]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value) if value < 0 else writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
