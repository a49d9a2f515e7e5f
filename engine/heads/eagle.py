"""EAGLE-3, and P-EAGLE, which drafts in one pass.

EAGLE-3 is a decoder layer over a token's embedding and the state before it, which
drafts token by token.

The row of token t reads the target's states at t - 1 (`project`), or, below a drafted token, the
head's own output there. Its output is the state that the next row reads, and the logits of token t
+ 1 come from it. P-EAGLE puts rows of a mask token after the text instead: each drafts one token
more, and knows nothing of the tokens drafted before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.heads.config import HeadConfig
from engine.heads.head import Head, HeadOutput
from engine.heads.layers import DecoderLayer, Memory, Norm, Rotary, Rotation
from engine.heads.samplers import ChainSampler, Marginals


class FirstLayer(DecoderLayer):
    def __init__(self, config: Any, norm_before_residual: bool) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def forward(  # type: ignore[override]
        self, embedded_TH: Tensor, state_TH: Tensor, rotation: Rotation, memory: Memory
    ) -> Tensor:
        normed_TH = self.hidden_norm(state_TH)
        residual_TH = normed_TH if self._norm_before_residual else state_TH
        joined_TX = torch.cat([self.input_layernorm(embedded_TH), normed_TH], -1)
        state_TH = residual_TH + self.self_attn(joined_TX, rotation, memory)
        output_TH: Tensor = state_TH + self.mlp(self.post_attention_layernorm(state_TH))
        return output_TH


class Eagle3(Head):
    def __init__(self, config: HeadConfig, num_taps: int, names: frozenset[str]) -> None:
        super().__init__(config, names)
        layers = config.layers
        width = config.hidden_size
        size = config.state_size
        eps = layers.rms_norm_eps
        self.input_norm = Norm(num_taps * size, eps) if config.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList([Norm(size, eps) for _ in range(num_taps)] if config.fc_norm else [])
        self.fc = nn.Linear(num_taps * size, width, bias=False)
        others = [DecoderLayer(layers, number) for number in range(1, layers.num_hidden_layers)]
        self.layers = nn.ModuleList([FirstLayer(layers, config.norm_before_residual), *others])
        self.norm = Norm(width, eps)
        self.rotary = Rotary(layers)

    def project(self, taps_TX: Tensor) -> Tensor:
        """Return [T, H] the input of rows, projected from the target's states."""
        taps_TX = self.input_norm(taps_TX)
        if self.fc_norm:
            chunks = taps_TX.chunk(len(self.fc_norm), -1)
            taps_TX = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        projected_TH: Tensor = self.fc(taps_TX)
        return projected_TH

    def forward(self, token_ids_T: Tensor, state_TH: Tensor, positions_T: Tensor, memory: Memory) -> Tensor:
        """Return [T, H] the states that the next rows read."""
        rotation = self.rotary(positions_T, state_TH.dtype)
        first, *others = self.layers
        state_TH = first(self.embed(token_ids_T), state_TH, rotation, memory)
        for layer in others:
            state_TH = layer(state_TH, rotation, memory)
        if not self.config.norm_output:
            return state_TH
        normed_TH: Tensor = self.norm(state_TH)
        return normed_TH

    def products(self, state_NH: Tensor) -> Tensor:
        """Return [N, draft vocabulary] products of normed states with the output head."""
        if not self.config.norm_output:
            state_NH = self.norm(state_NH)
        return super().products(state_NH)


class PEagle(Eagle3):
    def __init__(self, config: HeadConfig, num_taps: int, names: frozenset[str]) -> None:
        super().__init__(config, num_taps, names)
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, num_taps * config.state_size))
        """Replaces the target's states in rows of the mask token."""

    def sampler(self, output: HeadOutput, lengths: Sequence[int], vocab_size: int) -> ChainSampler:  # noqa: ARG002
        """Return the sampler from outputs at texts' last rows and masks."""
        return Marginals(self.in_target_tokens(self.scaled(output.product_NX), vocab_size))
