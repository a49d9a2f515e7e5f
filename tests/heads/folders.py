"""Random tiny heads, written as they are published: both layouts of EAGLE-3, all flags."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.execution.heads.config import check_target
from engine.execution.heads.loading import head_config, load_head
from engine.execution.loading import LoadedModel, adopt_head
from tests.engine import tiny

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 24, 4, 2, 8, 40
EPS = 1e-5
TARGET_WIDTH = 32
TAPS = (1, 2, 4)


@dataclass
class Written:
    """A head on disk, and its weights by the names of the speculators layout."""

    folder: Path
    tensors: dict[str, Tensor]
    flags: dict[str, Any]
    taps: tuple[int, ...] = TAPS
    extra: dict[str, Any] = field(default_factory=dict)


def target(vocabulary: int = 97, layers: int = 4, spread: float = 0.3) -> LoadedModel:
    """What the heads read: wider than they are."""
    return tiny.llama(seed=31, vocabulary=vocabulary, layers=layers, spread=spread)


def write_eagle(
    folder: Path,
    layout: str = "speculators",
    vocabulary: int = 97,
    draft_vocabulary: int = 41,
    width: int = WIDTH,
    layers: int = 1,
    shares: tuple[str, ...] = (),
    layer_type: str = "llama",
    taps: tuple[int, ...] = TAPS,
    scale: float = 1.0,
    binary: bool = False,
    **flags: Any,
) -> Written:
    """Write an EAGLE-3 head. layout: `speculators` or `eagle`; shares: what is left out and taken from the target."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int, spread: float | None = None) -> Tensor:
        return torch.randn(shape, generator=generator) * (scale * shape[-1] ** -0.5 if spread is None else spread)

    def norm(size: int) -> Tensor:
        return 1 + random(size, spread=0.3)

    tensors = {"fc.weight": random(width, len(taps) * TARGET_WIDTH), "norm.weight": norm(width)}
    has_norms = layer_type == "qwen3"
    for number in range(layers):
        name, inputs = f"layers.{number}.", 2 * width if number == 0 else width
        if number == 0:
            tensors[f"{name}hidden_norm.weight"] = norm(width)
        for one in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{one}.weight"] = norm(width)
        for one, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{name}self_attn.{one}_proj.weight"] = random(rows * HEAD_DIM, inputs, spread=0.4)
            if flags.get("attention_bias"):
                tensors[f"{name}self_attn.{one}_proj.bias"] = random(rows * HEAD_DIM, spread=0.3)
            if has_norms and one != "v":
                tensors[f"{name}self_attn.{one}_norm.weight"] = norm(HEAD_DIM)
        tensors[f"{name}self_attn.o_proj.weight"] = random(width, HEADS * HEAD_DIM)
        if flags.get("attention_bias"):
            tensors[f"{name}self_attn.o_proj.bias"] = random(width, spread=0.3)
        for one, shape in (("gate", (INNER, width)), ("up", (INNER, width)), ("down", (width, INNER))):
            tensors[f"{name}mlp.{one}_proj.weight"] = random(*shape)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(len(taps) * TARGET_WIDTH)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": norm(TARGET_WIDTH) for number in range(len(taps))}
    if "embed_tokens" not in shares:
        tensors["embed_tokens.weight"] = random(vocabulary, width, spread=1.0)
    if "lm_head" not in shares:
        tensors["lm_head.weight"] = random(draft_vocabulary, width)
    if draft_vocabulary != vocabulary:
        kept = torch.randperm(vocabulary, generator=generator)[:draft_vocabulary].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocabulary)
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, kept, True)
    sizes = {
        "model_type": layer_type,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "attention_bias": flags.pop("attention_bias", False),
    }
    common = {"draft_vocab_size": draft_vocabulary, "eagle_aux_hidden_state_layer_ids": list(taps)}
    if width != TARGET_WIDTH:
        common["target_hidden_size"] = TARGET_WIDTH
    if layout == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "speculators_version": "0.5.0",
            "transformer_layer_config": sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "somewhere/target", "architectures": ["LlamaForCausalLM"]},
            },
        }
        stored = tensors
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **sizes, "rope_theta": 500.0, "rope_scaling": None}
        stored = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | common | flags))
    if binary:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return Written(folder, tensors, {**flags, "attention_bias": sizes["attention_bias"]}, taps)


def load(written: Written, of: LoadedModel) -> LoadedModel:
    """The head behind a target, as a start loads it."""
    config = head_config(str(written.folder), None)
    assert config is not None
    check_target(config, of.model.config, of.name)
    return adopt_head(load_head(config, None, of.model), of)
