"""Random tiny heads, written as they are published: every type, layout and flag."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.attention.tensors import NORMED
from engine.heads.config import check_target
from engine.heads.loading import head_config, load_head, mtp_config
from engine.start.loading import LoadedModel, adopt_head
from engine.start.loading import load as load_model
from tests.engine import tiny
from tests.models import families

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 24, 4, 2, 8, 40
EPS = 1e-5
TARGET_WIDTH = 32
TAPS = (1, 2, 4)
TAPS_OF_CONV, GROUP, CANDIDATES, WINDOW = 2, 8, 6, 7
"""Sizes of heads that draft blocks."""


class HybridParts(NamedTuple):
    """Names of the parts of a hybrid's MTP module, and the types of its layers."""

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    layers: tuple[str, ...] = ("full_attention",)
    added: int = 1
    """Number that is added to weights of norms."""


HYBRID_PARTS = {
    "qwen": HybridParts("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "nemotron_h": HybridParts(
        "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm", ("full_attention", "moe"), 0
    ),
}


@dataclass
class Written:
    """A head on disk, and its weights by the names of the speculators layout."""

    folder: Path
    tensors: dict[str, Tensor]
    flags: dict[str, Any]
    taps: tuple[int, ...] = TAPS
    extra: dict[str, Any] = field(default_factory=dict)


def target(vocabulary: int = 97, layers: int = 4, spread: float = 0.3) -> LoadedModel:
    """Hidden states that the heads read, wider than the heads."""
    return tiny.llama(seed=31, vocabulary=vocabulary, layers=layers, spread=spread)


class Random:
    """Random weights."""

    def __init__(self, scale: float = 1.0) -> None:
        self._generator, self._scale = torch.Generator().manual_seed(7), scale
        self.tensors: dict[str, Tensor] = {}

    def normal(self, *shape: int, spread: float | None = None) -> Tensor:
        by_width: float = self._scale * shape[-1] ** -0.5
        return torch.randn(shape, generator=self._generator) * (by_width if spread is None else spread)

    def norm(self, size: int) -> Tensor:
        return 1 + self.normal(size, spread=0.3)

    def layer(self, number: int, width: int, inputs: int, has_norms: bool, has_bias: bool = False) -> None:
        """Return the weights of a layer whose attention reads this many inputs."""
        name, tensors = f"layers.{number}.", self.tensors
        for one in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{one}.weight"] = self.norm(width)
        for one, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{name}self_attn.{one}_proj.weight"] = self.normal(rows * HEAD_DIM, inputs, spread=0.4)
            if has_bias:
                tensors[f"{name}self_attn.{one}_proj.bias"] = self.normal(rows * HEAD_DIM, spread=0.3)
            if has_norms and one != "v":
                tensors[f"{name}self_attn.{one}_norm.weight"] = self.norm(HEAD_DIM)
        tensors[f"{name}self_attn.o_proj.weight"] = self.normal(width, HEADS * HEAD_DIM)
        if has_bias:
            tensors[f"{name}self_attn.o_proj.bias"] = self.normal(width, spread=0.3)
        for one, shape in (("gate", (INNER, width)), ("up", (INNER, width)), ("down", (width, INNER))):
            tensors[f"{name}mlp.{one}_proj.weight"] = self.normal(*shape)

    def vocabulary(self, vocabulary: int, draft_vocabulary: int, width: int, shares: tuple[str, ...]) -> None:
        """Embeddings and output head, and the map of a smaller vocabulary."""
        if "embed_tokens" not in shares:
            self.tensors["embed_tokens.weight"] = self.normal(vocabulary, width, spread=1.0)
        if "lm_head" not in shares:
            self.tensors["lm_head.weight"] = self.normal(draft_vocabulary, width)
        if draft_vocabulary != vocabulary:
            kept = torch.randperm(vocabulary, generator=self._generator)[:draft_vocabulary].sort().values
            self.tensors["d2t"] = kept - torch.arange(draft_vocabulary)
            self.tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, kept, True)


def sizes(layer_type: str, vocabulary: int, width: int, layers: int, has_bias: bool = False) -> dict[str, Any]:
    """Fields of a transformers config."""
    return {
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
        "attention_bias": has_bias,
    }


def speculators(kind: str, layers: dict[str, Any]) -> dict[str, Any]:
    """A config of the speculators layout."""
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "transformer_layer_config": layers | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "somewhere/target", "architectures": ["LlamaForCausalLM"]},
        },
    }


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], binary: bool = False) -> None:
    """Write a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


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
    kind: str = "eagle3",
    target_width: int = TARGET_WIDTH,
    **flags: Any,
) -> Written:
    """Write an EAGLE-3 head, or its variant of one pass (kind `peagle`).

    layout: speculators or eagle; shares: what is left out and taken from the target.
    """
    random, has_bias = Random(scale), bool(flags.pop("attention_bias", False))
    tensors = random.tensors
    tensors |= {"fc.weight": random.normal(width, len(taps) * target_width), "norm.weight": random.norm(width)}
    tensors["layers.0.hidden_norm.weight"] = random.norm(width)
    for number in range(layers):
        random.layer(number, width, width if number else 2 * width, layer_type == "qwen3", has_bias)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = random.norm(len(taps) * target_width)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": random.norm(target_width) for number in range(len(taps))}
    random.vocabulary(vocabulary, draft_vocabulary, width, shares)
    common = {"draft_vocab_size": draft_vocabulary, "eagle_aux_hidden_state_layer_ids": list(taps)}
    if width != target_width:
        common["target_hidden_size"] = target_width
    if kind == "peagle":
        tensors["mask_hidden"] = random.normal(1, 1, len(taps) * target_width, spread=1.0)
        common["mask_token_id"] = vocabulary - 1
    fields = sizes(layer_type, vocabulary, width, layers, has_bias)
    if layout == "speculators":
        config, stored = speculators(kind, fields), tensors
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **fields, "rope_theta": 500.0, "rope_scaling": None}
        stored = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save(folder, config | common | flags, stored, binary)
    return Written(folder, tensors, {"norm_before_residual": layout == "speculators", **flags}, taps, common)


def write_block(
    folder: Path,
    kind: str = "dflash",
    layout: str = "speculators",
    vocabulary: int = 97,
    draft_vocabulary: int = 41,
    width: int = WIDTH,
    layers: int = 2,
    size: int = 5,
    taps: tuple[int, ...] = TAPS,
    scale: float = 1.0,
    layer_types: tuple[str, ...] = (),
    rank: int = 6,
    **flags: Any,
) -> Written:
    """Write a head that drafts a block.

    layout: speculators, or z-lab, which shares the target's vocabulary; rank: of the Markov term
    and of the selector.
    """
    is_flat = layout == "z-lab"
    if is_flat or kind == "dflash2":
        draft_vocabulary = vocabulary
    if is_flat:
        width = TARGET_WIDTH
    random = Random(scale)
    tensors = random.tensors
    tensors["fc.weight"] = random.normal(width, len(taps) * TARGET_WIDTH)
    tensors |= {f"{name}.weight": random.norm(width) for name in ("hidden_norm", "norm")}
    for number in range(layers):
        random.layer(number, width, width, True)
        for one in ("attention_conv", "mlp_conv") if kind == "dflash2" else ():
            tensors[f"layers.{number}.{one}.base_kernel"] = random.normal(2, TAPS_OF_CONV, width, spread=0.7)
            rows = 2 * TAPS_OF_CONV * width // GROUP
            tensors[f"layers.{number}.{one}.kernel_projection.weight"] = random.normal(rows, width, spread=0.2)
    random.vocabulary(vocabulary, draft_vocabulary, width, ("embed_tokens", "lm_head") if is_flat else ())
    common: dict[str, Any] = {"block_size": size, "mask_token_id": vocabulary - 1}
    if kind == "dspark":
        tensors["markov_head.markov_w1.weight"] = random.normal(vocabulary, rank, spread=1.0)
        tensors["markov_head.markov_w2.weight"] = random.normal(draft_vocabulary, rank, spread=0.5)
        common |= {"markov_rank": rank}
        for name, rows, columns in (("gate", rank, width + rank), ("joint", 3 * rank, 2 * rank + width)):
            if flags.get("markov_head_type") == {"gate": "gated", "joint": "rnn"}[name]:
                tensors[f"markov_head.{name}_proj.weight"] = random.normal(rows, columns, spread=0.5)
                tensors[f"markov_head.{name}_proj.bias"] = random.normal(rows, spread=0.3)
        tensors |= {"confidence_head.proj.weight": random.normal(1, width), "confidence_head.proj.bias": torch.zeros(1)}
    if kind == "dflash2":
        for one in ("predecessor", "successor"):
            tensors[f"candidate_selector.{one}_codebook"] = random.normal(vocabulary, rank, spread=1.0)
        tensors["candidate_selector.hidden_projection.weight"] = random.normal(rank, width)
        common |= {"conv_kernel_size": TAPS_OF_CONV, "conv_group_size": GROUP, "selector_rank": rank}
        common["selector_top_k"] = min(CANDIDATES, vocabulary)
    fields = sizes("qwen3", vocabulary, width, layers)
    if layer_types:
        fields |= {"layer_types": list(layer_types), "sliding_window": WINDOW, "use_sliding_window": True}
    if is_flat:
        inner = common | {"target_layer_ids": [tap - 1 for tap in taps]} | flags.pop("inner", {})
        name = "DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"
        config = {
            "architectures": [name],
            **fields,
            "rope_theta": 500.0,
            "num_target_layers": 4,
            "dflash_config": inner,
        }
    else:
        config = speculators(kind, fields) | common | {"aux_hidden_state_layer_ids": list(taps)}
        config |= {"draft_vocab_size": draft_vocabulary, "target_hidden_size": TARGET_WIDTH}
        inner = common
    save(folder, config | flags, tensors)
    return Written(folder, tensors, flags, taps, {"kind": kind, "layers": layers, **fields, **inner})


def write_mtp(
    folder: Path, vocabulary: int = 97, layers: int = 3, experts: int = 4, copies: bool = True, shards: bool = False
) -> Written:
    """Write a random GLM-4.5 with an MTP module, as it is published: the layer after the last.

    copies: whether the module has (wrong) copies of the target's embeddings and output head.
    """
    import transformers

    config = transformers.Glm4MoeConfig(
        **sizes("glm4_moe", vocabulary, TARGET_WIDTH, layers, True) | {"max_position_embeddings": 256},
        use_qk_norm=True,
        moe_intermediate_size=16,
        n_routed_experts=experts,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        initializer_range=0.3,
        architectures=["Glm4MoeForCausalLM"],
    )
    torch.manual_seed(31)
    model, random, width = transformers.AutoModelForCausalLM.from_config(config), Random(), TARGET_WIDTH
    # Else the module's norm would hide what the target's does.
    model.model.norm.weight.data = random.norm(width)
    model.save_pretrained(folder)
    random.layer(0, width, width, True, True)
    tensors = {
        name.removeprefix("layers.0."): one
        for name, one in random.tensors.items()
        if ".mlp." not in name and not name.endswith("o_proj.bias")
    }
    tensors |= {f"{name}.weight": random.norm(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors["eh_proj.weight"] = random.normal(width, 2 * width)
    tensors["mlp.gate.weight"] = random.normal(experts, width)
    tensors["mlp.gate.e_score_correction_bias"] = random.normal(experts, spread=0.2)
    for place in (*(f"experts.{number}" for number in range(experts)), "shared_experts"):
        for one, shape in (("gate", (16, width)), ("up", (16, width)), ("down", (width, 16))):
            tensors[f"mlp.{place}.{one}_proj.weight"] = random.normal(*shape)
    for name in ("embed_tokens.weight", "shared_head.head.weight") if copies else ():
        tensors[name] = random.normal(vocabulary, width)
    tensors = {f"model.layers.{layers}.{name}": tensor for name, tensor in tensors.items()}
    whole = folder / "model.safetensors"
    parts = {"b.safetensors": tensors, "a.safetensors": load_file(whole)}
    if shards:
        whole.unlink()
        for name, part in parts.items():
            save_file(part, folder / name, {"format": "pt"})
        places = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    else:
        save_file({name: one for part in parts.values() for name, one in part.items()}, whole, {"format": "pt"})
    return Written(folder, tensors, {}, (NORMED,))


def write_hybrid_mtp(folder: Path, vocabulary: int = 97, name: str = "qwen3_5_text", stacked: bool = False) -> Written:
    """Write a random hybrid with an MTP module, as it is published: a layer that attends, or two.

    name: its `model_type`; stacked: whether the module's experts are stored as two stacks.
    """
    config = families.config(name, vocab_size=vocabulary)
    field = {"nemotron_h": "num_nextn_predict_layers", "qwen3_next": None}.get(name, "mtp_num_hidden_layers")
    if field is not None:
        setattr(config, field, 1)
    model = tiny.load_model(config, 31).model
    random, width = Random(), config.hidden_size
    parts = HYBRID_PARTS["nemotron_h" if name == "nemotron_h" else "qwen"]
    # Else the module's norm would hide what the target's does.
    final_norm(model.model).weight.data += random.normal(width, spread=0.3)
    model.save_pretrained(folder)
    tensors = {}
    for number, kind in enumerate(parts.layers):
        layer = model.model.layers[config.layer_types.index(kind)].state_dict()
        tensors |= {f"mtp.layers.{number}.{name}": random.normal(*one.shape, spread=0.2) for name, one in layer.items()}
    for one in (parts.enorm, parts.hnorm, parts.norm):
        tensors[f"mtp.{one}.weight"] = random.normal(width, spread=0.3)
    tensors[f"mtp.{parts.eh_proj}.weight"] = random.normal(width, 2 * width)
    whole = folder / "model.safetensors"
    stored = tensors if stacked else experts_apart(tensors)
    save_file(load_file(whole) | stored, whole, {"format": "pt"})
    return Written(folder, tensors, {}, (NORMED,), {"parts": parts})


def final_norm(body: Any) -> Any:
    """Return the norm after the last layer of a model."""
    return body.norm_f if hasattr(body, "norm_f") else body.norm


def experts_apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which each stacked expert has tensors by its number."""
    result = {}
    for name, tensor in tensors.items():
        begin, is_expert, kind = name.partition(".experts.")
        if not is_expert:
            result[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for number, expert in enumerate(tensor):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                result[f"{begin}.experts.{number}.{part}.weight"] = rows.clone()
    return result


def load_target(written: Written) -> LoadedModel:
    """The target that holds an MTP module."""
    return load_model(str(written.folder), None, "float32", tiny.DEVICE)


def load(written: Written, of: LoadedModel) -> LoadedModel:
    """The head behind a target, as a start loads it."""
    config = (mtp_config if written.taps == (NORMED,) else head_config)(str(written.folder), None)
    assert config is not None
    check_target(config, of.model.config, of.name)
    return adopt_head(load_head(config, None, of.model), of)


def refused(_load_pair: Any, *_: Any) -> None:
    """Stand in for reading weights, which a test must not reach."""
    raise AssertionError("weights are read")
