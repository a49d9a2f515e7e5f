"""MTP modules (multi-token prediction, NextN) inside the checkpoints of their targets.

The row of token t joins its embedding and the target's state at t - 1 after the final norm, and
runs one more decoder layer of the target's own type, with its own K/V. Its output after the
module's norm gives the logits of token t + 1, and is the state that a drafted token below it reads.
Source: `MtpModel` of transformers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention.attention import HOOK
from engine.attention.tensors import NORMED
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
    experts: str = "num_experts"
    """Field of the number of routed experts."""
    least: int = 0
    """Number of modules if the field is not set."""


_FAMILIES = {
    "glm4_moe": _Family("num_nextn_predict_layers", "glm4_moe", "Glm4Moe", experts="n_routed_experts"),
    "qwen3_5_text": _Family("mtp_num_hidden_layers", "qwen3_5", "Qwen3_5", "RMSNorm", "TextRotaryEmbedding"),
    "qwen3_5_moe_text": _Family("mtp_num_hidden_layers", "qwen3_5_moe", "Qwen3_5Moe", "RMSNorm", "TextRotaryEmbedding"),
    "qwen3_next": _Family("num_nextn_predict_layers", "qwen3_next", "Qwen3Next", "RMSNorm", least=1),
}
FAMILIES = tuple(_FAMILIES)
_OF_TARGET = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's weights, which are not loaded."""
_OWN = ("enorm.", "hnorm.", "eh_proj.", "norm.")
_RENAMED = {
    "shared_head.norm.": "norm.",
    "fc.": "eh_proj.",
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "layers.0.": "",
}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def read_mtp(name: str, raw: Raw) -> HeadConfig:
    """Return the MTP module's configuration; raise ConfigError if none is served."""
    kind = str(raw.get("model_type"))
    family = _FAMILIES.get(kind)
    if family is None:
        raise ConfigError(f"{name}: MTP modules are served in {', '.join(FAMILIES)}, not in {kind}; use a draft model")
    count = raw.get(family.number, family.least)
    if count != 1:
        raise ConfigError(f"{name}: {family.number} is {count!r}; only one MTP module is served")
    if raw.get("quantization_config"):
        raise ConfigError(f"{name}: MTP modules of quantised checkpoints are not served; use a draft model")
    target_config = layers_config(name, kind, raw)
    if kind == "glm4_moe":
        layers = target_config.get_mtp_config()
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
    experts: dict[str, dict[int, Tensor]] = {"gate": {}, "up": {}, "down": {}}
    for key, tensor in stored.items():
        name = key.removeprefix(prefix_of(config))
        for begin, renamed in _RENAMED.items():
            if name.startswith(begin):
                name = renamed + name.removeprefix(begin)
        if expert := _EXPERT.fullmatch(name):
            experts[expert[2]][int(expert[1])] = tensor
        elif name not in _OF_TARGET:
            result[name if name.startswith(_OWN) else f"block.{name}"] = tensor
    if not any(experts.values()):  # the layer is dense, or its experts are stored as stacks
        return result
    count = int(getattr(config.layers, _FAMILIES[config.layers.model_type].experts, 0))
    for which, by_number in experts.items():
        if sorted(by_number) != list(range(count)):
            raise LoadError(f"{config.name}: the MTP module has {len(by_number)} of {count} experts ({which}_proj)")
    gates, ups, downs = ([experts[which][number] for number in range(count)] for which in experts)
    pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
    result |= {"block.mlp.experts.gate_up_proj": torch.stack(pairs), "block.mlp.experts.down_proj": torch.stack(downs)}
    return result


class Mtp(Head):
    def __init__(self, config: HeadConfig, _num_taps: int, names: frozenset[str]) -> None:
        super().__init__(config, names)
        layers = config.layers
        family = _FAMILIES[layers.model_type]
        code = getattr(getattr(import_transformers().models, family.code), f"modeling_{family.code}")
        width = config.hidden_size
        norm: Any = getattr(code, family.classes + family.norm) if family.norm else Norm
        self.enorm = norm(width, layers.rms_norm_eps)
        self.hnorm = norm(width, layers.rms_norm_eps)
        self.norm = norm(width, layers.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        # As in the target; the other waits for each expert's tokens.
        layers._experts_implementation = "grouped_mm"
        self.block = getattr(code, f"{family.classes}DecoderLayer")(layers, 0)
        with torch.device("cpu"):  # as in `layers.Rotary`
            self.rotary = getattr(code, family.classes + family.rotary)(layers)

    def project(self, taps_TX: Tensor) -> Tensor:
        """Return [T, H] the input of rows: the target's states as they are."""
        return taps_TX

    def forward(self, token_ids_T: Tensor, state_TH: Tensor, positions_T: Tensor, memory: Memory) -> Tensor:
        """Return [T, H] the normed states that the next rows and the logits read."""
        joined_TX = torch.cat([self.enorm(self.embed(token_ids_T)), self.hnorm(state_TH)], -1)
        hidden_1TH: Any = self.eh_proj(joined_TX).unsqueeze(0)
        rotation = self.rotary(hidden_1TH, positions_T.unsqueeze(0))
        output_1TH = self.block(hidden_1TH, position_embeddings=rotation, metadata=memory)
        output_TH: Tensor = self.norm(output_1TH[0])
        return output_TH
