"""MTP modules (multi-token prediction, NextN) inside the checkpoints of their targets.

The row of token t joins its embedding and the target's state at t - 1 after the final norm, and
runs one more decoder layer of the target's own type, with its own K/V. In Nemotron-H, attention and
experts are two layers. The output after the module's norm gives the logits of token t + 1, and is
the state that a drafted token below it reads. Source: `MtpModel` of transformers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.attention import HOOK
from engine.attention.tensors import NORMED, KVShape
from engine.errors import ConfigError, LoadError
from engine.heads.config import HeadConfig, Raw, layers_config
from engine.heads.head import Head
from engine.heads.layers import Memory, Norm
from engine.models.importing import import_transformers


class _Family(NamedTuple):
    """Names that checkpoints of a family, and transformers' code, give the parts of a module."""

    number: str
    """Field of the number of modules."""
    code: str
    """Module of transformers, and the beginning of its classes' names."""
    classes: str
    norm: str = ""
    """Class of its norms, if their weights are added to one."""
    rotary: str = "RotaryEmbedding"
    """Empty if positions have no part in attention."""
    layer: str = "DecoderLayer"
    epsilon: str = "rms_norm_eps"
    experts: str = "num_experts"
    """Field of the number of routed experts."""
    assumed: int = 0
    """Number of modules if the field is not set."""


_FAMILIES = {
    "glm4_moe": _Family("num_nextn_predict_layers", "glm4_moe", "Glm4Moe", experts="n_routed_experts"),
    "nemotron_h": _Family(
        "num_nextn_predict_layers",
        "nemotron_h",
        "NemotronH",
        rotary="",
        layer="Block",
        epsilon="layer_norm_epsilon",
        experts="n_routed_experts",
    ),
    "qwen3_5_text": _Family("mtp_num_hidden_layers", "qwen3_5", "Qwen3_5", "RMSNorm", "TextRotaryEmbedding"),
    "qwen3_5_moe_text": _Family("mtp_num_hidden_layers", "qwen3_5_moe", "Qwen3_5Moe", "RMSNorm", "TextRotaryEmbedding"),
    "qwen3_next": _Family("num_nextn_predict_layers", "qwen3_next", "Qwen3Next", "RMSNorm", assumed=1),
}
FAMILIES = tuple(_FAMILIES)
_OF_TARGET = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's weights, which are not loaded."""
_OWN = ("enorm.", "hnorm.", "eh_proj.", "norm.", "layers.")
_RENAMED = {
    "shared_head.norm.": "norm.",
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "layers.0.enorm.": "enorm.",
    "layers.0.hnorm.": "hnorm.",
    "layers.0.eh_proj.": "eh_proj.",
    "layers.1.final_layernorm.": "norm.",
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.((gate|up|down)_proj)\.weight")
_NEMOTRON_LAYERS = ["full_attention", "moe"]


def read_mtp(name: str, raw: Raw) -> HeadConfig:
    """Return the MTP module's configuration; raise ConfigError if none is served."""
    kind = str(raw.get("model_type"))
    family = _FAMILIES.get(kind)
    if family is None:
        raise ConfigError(f"{name}: MTP modules are served in {', '.join(FAMILIES)}, not in {kind}; use a draft model")
    count = raw.get(family.number, family.assumed)
    if count != 1:
        raise ConfigError(f"{name}: {family.number} is {count!r}; only one MTP module is served")
    if raw.get("quantization_config"):
        raise ConfigError(f"{name}: MTP modules of quantised checkpoints are not served; use a draft model")
    target_config = layers_config(name, kind, raw)
    if kind == "glm4_moe":
        layers = target_config.get_mtp_config()
    elif kind == "nemotron_h":
        layers = copy.deepcopy(target_config)
        layers.layer_types = layers.mtp_layers_block_type
        if layers.layer_types != _NEMOTRON_LAYERS:
            raise ConfigError(f"{name}: the MTP module has layers of {layers.layer_types}, not {_NEMOTRON_LAYERS}")
    else:  # transformers has no module of a hybrid; its layer attends
        layers = copy.deepcopy(target_config)
        layers.layer_types, layers.num_hidden_layers = ["full_attention"], 1
    layers.head_dim = getattr(layers, "head_dim", None) or layers.hidden_size // layers.num_attention_heads
    layers._attn_implementation, layers._experts_implementation = HOOK, "eager"
    size = int(layers.vocab_size)
    return HeadConfig(
        name=name,
        kind="mtp",
        layers=layers,
        vocab_size=size,
        draft_vocab_size=size,
        taps=(NORMED,),
        target_layers=int(target_config.num_hidden_layers),
    )


def prefix_of(config: HeadConfig) -> str:
    """Return the prefix of the module's tensors, in GLM the layer after the target's last."""
    if config.layers.model_type != "glm4_moe":
        return "mtp."
    return f"model.layers.{config.target_layers}."


def mtp_tensors(config: HeadConfig, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a checkpoint's tensors, and stack experts; raise LoadError if one lacks."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    prefix = prefix_of(config).removeprefix("model.")
    for key, tensor in stored.items():
        name = key.removeprefix("model.").removeprefix(prefix)
        for begin, renamed in _RENAMED.items():
            if name.startswith(begin):
                name = renamed + name.removeprefix(begin)
        if name in _OF_TARGET:
            continue
        name = name if name.startswith(_OWN) else f"layers.0.{name}"
        if expert := _EXPERT.fullmatch(name):
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
        else:
            result[name] = tensor
    count = int(getattr(config.layers, _FAMILIES[config.layers.model_type].experts, 0))
    for name, by_number in experts.items():
        if sorted(by_number) != list(range(count)):
            which = name.rpartition(".")[2]
            raise LoadError(f"{config.name}: the MTP module has {len(by_number)} of {count} experts ({which})")
        result[name] = torch.stack([by_number[number] for number in range(count)])
    for gate in [name for name in experts if name.endswith(".gate_proj")]:
        up = gate.replace("gate_proj", "up_proj")
        if up in experts:
            result[gate.replace("gate_proj", "gate_up_proj")] = torch.cat([result.pop(gate), result.pop(up)], 1)
    return result


class Mtp(Head):
    def __init__(self, config: HeadConfig, _num_taps: int, names: frozenset[str]) -> None:
        super().__init__(config, names)
        layers = config.layers
        family = _FAMILIES[layers.model_type]
        code = getattr(getattr(import_transformers().models, family.code), f"modeling_{family.code}")
        width, epsilon = config.hidden_size, getattr(layers, family.epsilon)
        norm: Any = getattr(code, family.classes + family.norm) if family.norm else Norm
        self.enorm = norm(width, epsilon)
        self.hnorm = norm(width, epsilon)
        self.norm = norm(width, epsilon)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        # As in the target; the other waits for each expert's tokens.
        layers._experts_implementation = "grouped_mm"
        layer = getattr(code, family.classes + family.layer)
        self.layers = nn.ModuleList([layer(layers, number) for number in range(layers.num_hidden_layers)])
        self.rotary: Any = None
        if family.rotary:
            with torch.device("cpu"):  # as in `layers.Rotary`
                self.rotary = getattr(code, family.classes + family.rotary)(layers)

    @property
    def kv_shape(self) -> KVShape:
        layers = self.config.layers
        return KVShape.equal(1, layers.num_key_value_heads, layers.head_dim, layers.head_dim)

    def project(self, taps_TX: Tensor) -> Tensor:
        """Return [T, H] the input of rows: the target's states as they are."""
        return taps_TX

    def forward(self, token_ids_T: Tensor, state_TH: Tensor, positions_T: Tensor, memory: Memory) -> Tensor:
        """Return [T, H] the normed states that the next rows and the logits read."""
        joined_TX = torch.cat([self.enorm(self.embed(token_ids_T)), self.hnorm(state_TH)], -1)
        hidden_1TH: Any = self.eh_proj(joined_TX).unsqueeze(0)
        named: dict[str, Any] = {"metadata": memory}
        if self.rotary is not None:
            named["position_embeddings"] = self.rotary(hidden_1TH, positions_T.unsqueeze(0))
        for layer in self.layers:
            hidden_1TH = layer(hidden_1TH, **named)
        output_TH: Tensor = self.norm(hidden_1TH[0])
        return output_TH
