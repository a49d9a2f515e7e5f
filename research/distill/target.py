"""The target while a head is trained for it.

Its states and distributions, by passes over whole texts.

Weights of a GGUF file are dequantised to bfloat16, so the states follow from the weights in the
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.attention.tensors import NORMED
from engine.errors import ConfigError
from engine.heads.head import TargetWeights
from engine.models.gguf.folder import file_of
from engine.models.taps import observing
from engine.start.loading import load
from engine.start.number_formats import arithmetic_dtype


@dataclass(frozen=True)
class Observed:
    """One pass of the target over a batch of texts."""

    logits_BV: Tensor
    """Below the last token of each row."""
    taps_BTX: Tensor
    """Its states at the taps, concatenated."""
    last_BTD: Tensor
    """Its states after the final norm."""


def _short_name(name: str) -> str:
    """Return a model's name without a folder of this machine.

    That of its GGUF file or folder, or on the hub.
    """
    folder = Path(name)
    if not folder.exists():
        return name
    return (file_of(folder) or folder).name


class Target:
    """A target model and the layers at which its states are read."""

    def __init__(self, name: str, revision: str | None, taps: Sequence[int] | None, device: torch.device) -> None:
        """Raises ConfigError and LoadError, as loading does."""
        has_bfloat16 = device.type == "cpu" and arithmetic_dtype("bfloat16", device) == torch.bfloat16
        self.name, self.device = name, device
        self.short_name = _short_name(name)
        self.model = load(name, revision, "bfloat16" if has_bfloat16 else "auto", device).model
        self.model.set_attn_implementation("sdpa")
        if device.type == "cpu" and not has_bfloat16:
            self.model.float()
        num_layers = self.config.num_hidden_layers
        self.taps = tuple(taps or sorted({min(2, num_layers), num_layers // 2, num_layers}))
        if bad := [tap for tap in self.taps if not 0 <= tap <= num_layers]:
            raise ConfigError(f"--taps {bad[0]}: {name} has {num_layers} layers")
        self.weights = TargetWeights.of(self.model, torch.float32)

    @property
    def config(self) -> Any:
        """The transformers config of its text."""
        return self.model.config.get_text_config()

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a token on disk."""
        return 2 * int(self.config.hidden_size) * (len(self.taps) + 1)

    @torch.inference_mode()
    def observe(self, token_ids_BT: Tensor) -> Observed:
        """One pass over whole texts.

        Shorter ones are filled up at their ends, which no other token sees.
        """
        states: dict[int, Tensor] = {}
        with observing(self.model, (*self.taps, NORMED), states.__setitem__):
            logits_BTV = self.model(token_ids_BT.to(self.device), use_cache=False, logits_to_keep=1).logits
        taps_BTX = torch.cat([states[tap] for tap in self.taps], -1)
        return Observed(logits_BTV[:, -1].float(), taps_BTX, states[NORMED])

    def check_logits(self, observed: Observed) -> None:
        """Raise ConfigError if the target does more to its logits than its output head does."""
        own_BV = linear(observed.last_BTD[:, -1].float(), self.weights.head_VD.to(self.device))
        scale = observed.logits_BV.abs().max()
        if (own_BV - observed.logits_BV).abs().max() > 0.05 * scale:
            raise ConfigError(
                f"{self.name}: its logits are scaled or bounded after its output head; heads are not trained for it yet"
            )
