"""MTP modules (multi-token prediction, NextN) inside the checkpoints of their targets.

The row of token t joins its embedding and the target's state at t - 1 after the final norm, and
runs one more decoder layer of the target's own type, with its own K/V. Its output after the
module's norm gives the logits of token t + 1, and is the state that a drafted token below it reads.
Source: `MtpModel` of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.attention import HOOK
from engine.attention.tensors import NORMED
from engine.errors import ConfigError, LoadError
from engine.heads.config import HeadConfig, Raw, layers_config
from engine.heads.head import Head
from engine.heads.layers import Memory, Norm
from engine.models.importing import import_transformers

FAMILIES = ("glm4_moe",)
_OF_TARGET = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's weights, which are not loaded."""
_OWN = ("enorm.", "hnorm.", "eh_proj.", "norm.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def read_mtp(name: str, raw: Raw) -> HeadConfig:
    """Return the MTP module's configuration; raise ConfigError if none is served."""
    kind, count = raw.get("model_type"), raw.get("num_nextn_predict_layers")
    if kind not in FAMILIES:
        raise ConfigError(f"{name}: MTP modules are served in {', '.join(FAMILIES)}, not in {kind}; use a draft model")
    if count != 1:
        raise ConfigError(f"{name}: num_nextn_predict_layers is {count!r}; only one MTP module is served")
    if raw.get("quantization_config"):
        raise ConfigError(f"{name}: MTP modules of quantised checkpoints are not served; use a draft model")
    target_config = layers_config(name, str(kind), raw)
    layers = target_config.get_mtp_config()
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
    """Return the prefix of the module's tensors: the layer after the target's last."""
    return f"model.layers.{config.target_layers}."


def mtp_tensors(config: HeadConfig, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a checkpoint's tensors, and stack experts; raise LoadError if one lacks."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {"gate": {}, "up": {}, "down": {}}
    for key, tensor in stored.items():
        name = key.removeprefix(prefix_of(config)).replace("shared_head.norm.", "norm.")
        if expert := _EXPERT.fullmatch(name):
            experts[expert[2]][int(expert[1])] = tensor
        elif name not in _OF_TARGET:
            result[name if name.startswith(_OWN) else f"block.{name}"] = tensor
    count = int(config.layers.n_routed_experts)
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
        glm = import_transformers().models.glm4_moe.modeling_glm4_moe
        layers = config.layers
        width = config.hidden_size
        self.enorm = Norm(width, layers.rms_norm_eps)
        self.hnorm = Norm(width, layers.rms_norm_eps)
        self.norm = Norm(width, layers.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        # As in the target; the other waits for each expert's tokens.
        layers._experts_implementation = "grouped_mm"
        self.block = glm.Glm4MoeDecoderLayer(layers, 0)
        with torch.device("cpu"):  # as in `layers.Rotary`
            self.rotary = glm.Glm4MoeRotaryEmbedding(layers)

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
