"""Model folders for daemons under test: random weights of a few hundred kB.

Written without torch, so that these tests start as fast as the HTTP process does.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TOKENIZER = Path(__file__).resolve().parents[2] / "server" / "demo" / "target"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
BOS, EOS = 1, 2
_HIDDEN, _INNER, _HEADS, _KV_HEADS = 64, 128, 4, 2


@dataclass(frozen=True)
class TinyModels:
    """A random Llama, and its first layer alone as a draft that agrees with it now and then."""

    target: Path
    draft: Path


def write_pair(folder: Path) -> TinyModels:
    """Write both models below `folder`."""
    models = TinyModels(folder / "target", folder / "draft")
    write_folder(models.target, llama_config(4), llama_weights(4))
    write_folder(models.draft, llama_config(1), llama_weights(1))
    return models


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Any] | None = None) -> None:
    """A model folder: config, tokenizer, and weights where there are some."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, folder / name)
    if weights is not None:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def llama_config(num_layers: int) -> dict[str, Any]:
    """A Llama's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }


def llama_weights(num_layers: int, hidden: int = _HIDDEN) -> dict[str, Any]:
    """Random weights; the first layers are the same whatever `num_layers` is.

    hidden: width of the residual; the heads have the same width for any.
    """
    random = np.random.default_rng(0)
    key_value = _HIDDEN * _KV_HEADS // _HEADS
    shapes = {
        "self_attn.q_proj": (_HIDDEN, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, _HIDDEN),
        "mlp.gate_proj": (_INNER, hidden),
        "mlp.up_proj": (_INNER, hidden),
        "mlp.down_proj": (hidden, _INNER),
    }
    norm = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": (0.1 * random.standard_normal((VOCAB_SIZE, hidden))).astype(np.float32),
        "model.norm.weight": norm,
    }
    for layer in range(num_layers):
        spread = 0.3 if layer == 0 else 0.1
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = (spread * random.standard_normal(shape)).astype(np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = norm
    return weights
