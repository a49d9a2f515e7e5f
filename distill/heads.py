"""A new head for a target: its config in the speculators layout, and its first weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from distill.target import Target
from engine.errors import ConfigError
from engine.models.heads.config import check_target, read_head
from engine.models.heads.dflash import DFlash
from engine.models.heads.eagle import Eagle3
from engine.models.heads.head import Head
from engine.models.heads.loading import build_head, shapes_of

KINDS: dict[str, type[Head]] = {"eagle3": Eagle3, "dspark": DFlash}
MARKOV_RANK = 256


@dataclass(frozen=True)
class HeadShape:
    """Type and size of a head; widths are the target's."""

    kind: str
    num_layers: int
    draft_length: int
    """Depths that are trained; of dspark also the block's size."""
    mask_token_id: int
    """Token of rows whose tokens are not known yet; of eagle3 unused."""


def write_config(shape: HeadShape, target: Target) -> dict[str, Any]:
    """A config.json of the speculators layout."""
    config = target.config
    layers = {
        "model_type": "qwen3" if shape.kind == "dspark" else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.draft_length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    raw: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if shape.kind == "eagle3" else "DSparkSpeculator"],
        "speculators_model_type": shape.kind,
        "speculators_version": "0.5.0",
        "draft_vocab_size": config.vocab_size,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": shape.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": target.model.config.architectures},
        },
    }
    if shape.kind == "eagle3":
        flags = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": True}
        return raw | flags | {"eagle_aux_hidden_state_layer_ids": list(target.taps)}
    return raw | {
        "aux_hidden_state_layer_ids": list(target.taps),
        "block_size": shape.draft_length,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": True,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "is_causal": False,
    }


def new_head(shape: HeadShape, target: Target, seed: int) -> Head:
    """A head that shares the target's embeddings and output head, with random weights; raises ConfigError."""
    if shape.kind not in KINDS:
        raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, not {shape.kind}")
    if not hasattr(target.config, "intermediate_size"):
        raise ConfigError(f"{target.name}: a {target.config.model_type} without intermediate_size; not trained for yet")
    config = read_head(f"new {shape.kind} head", write_config(shape, target))
    assert config is not None
    check_target(config, target.model.config, target.name)
    generator = torch.Generator().manual_seed(seed)
    sizes = shapes_of(config, len(target.taps))
    weights = {name: _first(name, size, shape.num_layers, generator) for name, size in sizes.items()}
    head = build_head(config, len(target.taps), weights)
    head.attach(target.weights)
    return head.to(target.device).requires_grad_(True).train()


def _first(name: str, size: torch.Size, num_layers: int, generator: torch.Generator) -> Tensor:
    if len(size) == 1:
        return torch.ones(size)
    if name.endswith("markov_w2.weight"):
        return torch.zeros(size)
    spread = 0.02 if name.endswith("markov_w1.weight") else size[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        spread /= math.sqrt(2 * num_layers)
    return torch.randn(size, generator=generator) * spread


def save_head(head: Head, config: dict[str, Any], folder: Path) -> None:
    """Write a head in bfloat16, so that `polydraft serve --draft-model` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")
