"""A new head for a target: its config in the speculators layout, and its first weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.heads.config import HeadConfig, check_target, read_head
from engine.heads.head import Head
from engine.heads.loading import build_head, shapes_of
from research.distill.first_layer import StateFit, first_eagle_layer
from research.distill.target import Target

WEIGHTS = "model.safetensors"
KIND = "eagle3"
_WHOLE_VOCABULARY = 8192
"""Vocabularies up to this size are not made smaller."""


@dataclass(frozen=True)
class HeadShape:
    """Size of a head; widths are the target's."""

    num_layers: int
    draft_length: int
    """Depths that are trained."""
    draft_vocab_size: int
    """Tokens that the head may propose."""


def draft_vocab_size(wanted: int, vocab_size: int) -> int:
    """Return the size of a head's vocabulary: an eighth of a large one, if none is wanted."""
    usual = max(_WHOLE_VOCABULARY, vocab_size // 8)
    return min(vocab_size, wanted or usual)


def choose_tokens(counts_V: npt.NDArray[np.int64], size: int) -> Tensor | None:
    """Return [size] the most frequent tokens in ascending order, None for all of them.

    Of tokens that are equally frequent the first ones of the vocabulary are chosen: merges of
    tokenizers are sorted by their frequency.
    """
    if size == len(counts_V):
        return None
    return torch.from_numpy(np.sort(np.argsort(-counts_V, kind="stable")[:size]))


def write_config(shape: HeadShape, target: Target) -> dict[str, Any]:
    """A config.json of the speculators layout."""
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {}
    layers = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": config.num_attention_heads,
        # As many as heads: the embedding of a row's token reaches an EAGLE-3 head's states through
        # its values alone.
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.draft_length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": KIND,
        "speculators_version": "0.5.0",
        "draft_vocab_size": shape.draft_vocab_size,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.short_name, "architectures": target.model.config.architectures},
        },
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": list(target.taps),
    }


def checked_config(shape: HeadShape, target: Target) -> HeadConfig:
    """Return the configuration of a new head.

    Raise ConfigError for targets that no head is trained for.
    """
    if not hasattr(target.config, "intermediate_size"):
        raise ConfigError(f"{target.name}: a {target.config.model_type} without intermediate_size; not trained for yet")
    config = read_head("new head", write_config(shape, target))
    assert config is not None
    check_target(config, target.model.config, target.name)
    return config


def new_head(
    shape: HeadShape, target: Target, seed: int, tokens: Tensor | None = None, fit: StateFit | None = None
) -> Head:
    """A head with first weights; raises ConfigError.

    It shares the target's embeddings, and its output head has the target's rows, which are not
    trained. tokens: of its smaller vocabulary; fit: the head begins from it.
    """
    config = checked_config(shape, target)
    generator = torch.Generator().manual_seed(seed)
    sizes = shapes_of(config, len(target.taps))
    weights = {name: _first(name, size, shape.num_layers, generator) for name, size in sizes.items()}
    if fit is not None:
        weights |= first_eagle_layer(weights, fit, config.layers)
    if tokens is not None:
        weights["d2t"] = tokens - torch.arange(len(tokens))
        weights["lm_head.weight"] = target.weights.head_VD[tokens.to(target.device)].cpu()
    head = build_head(config, len(target.taps), weights)
    head.attach(target.weights)
    head = head.to(target.device).requires_grad_(True).train()
    if head.lm_head is not None:
        head.lm_head.requires_grad_(False)
    return head


def _first(name: str, size: torch.Size, num_layers: int, generator: torch.Generator) -> Tensor:
    if len(size) == 1:
        return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
    spread: float = size[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        spread /= math.sqrt(2 * num_layers)
    return torch.randn(size, generator=generator) * spread


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a head that `save_head` wrote; raise ConfigError."""
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder}: no head that can be read: {error}") from error


def tokens_of(weights: dict[str, Tensor]) -> Tensor | None:
    """Return [size] the tokens of a head with a smaller vocabulary.

    None for all of the target's.
    """
    distances = weights.get("d2t")
    return None if distances is None else distances + torch.arange(len(distances))


def take_weights(head: Head, weights: dict[str, Tensor], folder: Path) -> None:
    """Give a head the weights of an earlier head.

    Raise ConfigError if the earlier one has other weights.
    """
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"{folder}: a head of another type or size; choose the options that it has") from error


def save_head(head: Head, config: dict[str, Any], folder: Path) -> None:
    """Write a head in bfloat16, so that `polydraft serve --draft-model` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: _stored(tensor) for name, tensor in head.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")


def _stored(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu()
    return plain.to(torch.bfloat16) if plain.is_floating_point() else plain
