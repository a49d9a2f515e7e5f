"""Heads that draft a block in one pass: DFlash, DSpark and DFlash2.

The target's states at a token, projected, are the context: every layer stores their K and V, and
nothing else is computed of a text. The block after it is the text's last token and masks, whose
rows attend to the context and to each other. DSpark adds a term that depends on the previous token;
DFlash2 adds convolutions within the block and a selector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.attention.inputs import Ints
from engine.heads.config import BlockConfig, HeadConfig
from engine.heads.head import Head, HeadOutput
from engine.heads.layers import DecoderLayer, Memory, Norm, Rotary, Rotation
from engine.heads.samplers import CandidateSelector, ChainSampler, Marginals, Markov, MarkovHead, Selected

_IN, _OUT = 0, 1


class Convolution(nn.Module):
    """Causal convolutions of few taps around a part of a layer; kernels depend on the row."""

    def __init__(self, width: int, block: BlockConfig) -> None:
        super().__init__()
        self._block = block
        self.base_kernel = nn.Parameter(torch.empty(2, block.conv_taps, width))
        self.kernel_projection = nn.Linear(width, 2 * block.conv_taps * width // block.conv_group, bias=False)

    def forward(self, part: Callable[[Tensor], Tensor], state_TH: Tensor) -> Tensor:
        """Return [T, H] a layer part's output, with convolutions before and after it."""
        block = self._block
        change_TX = self.kernel_projection(state_TH).view(len(state_TH), 2, block.conv_taps, -1)
        kernel_TX = self.base_kernel + change_TX.repeat_interleave(block.conv_group, -1)
        return self.convolve(_OUT, kernel_TX, part(self.convolve(_IN, kernel_TX, state_TH)))

    def convolve(self, side: int, kernel_TX: Tensor, state_TH: Tensor) -> Tensor:
        """Return [T, H] the convolution of every block, padded with zeros at its beginning."""
        size = self._block.size
        state_RBH = state_TH.view(-1, size, state_TH.shape[-1])
        kernel_RBX = kernel_TX[:, side].view(-1, size, *kernel_TX.shape[2:])
        output_RBH = kernel_RBX[:, :, 0] * state_RBH
        for tap in range(1, min(self._block.conv_taps, size)):
            output_RBH[:, tap:] += kernel_RBX[:, tap:, tap] * state_RBH[:, :-tap]
        return output_RBH.view_as(state_TH)


class BlockLayer(DecoderLayer):
    """A layer over blocks, with convolutions if the head has them."""

    def __init__(self, config: Any, number: int, block: BlockConfig) -> None:
        super().__init__(config, number)
        has_convolutions = block.conv_taps > 0
        self.attention_conv = Convolution(config.hidden_size, block) if has_convolutions else None
        self.mlp_conv = Convolution(config.hidden_size, block) if has_convolutions else None

    def forward(self, state_TH: Tensor, rotation: Rotation, memory: Memory) -> Tensor:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(state_TH, rotation, memory)
        attends = partial(self.self_attn, rotation=rotation, memory=memory)
        state_TH = state_TH + self.attention_conv(attends, self.input_layernorm(state_TH))
        output_TH: Tensor = state_TH + self.mlp_conv(self.mlp, self.post_attention_layernorm(state_TH))
        return output_TH


class DFlash(Head):
    def __init__(self, config: HeadConfig, num_taps: int, names: frozenset[str]) -> None:
        super().__init__(config, names)
        assert config.block is not None
        self.block_config = block = config.block
        layers = config.layers
        width = config.hidden_size
        vocab = config.vocab_size
        self.fc = nn.Linear(num_taps * config.state_size, width, bias=False)
        self.hidden_norm = Norm(width, layers.rms_norm_eps)
        self.norm = Norm(width, layers.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(layers, number, block) for number in range(layers.num_hidden_layers)])
        self.rotary = Rotary(layers)
        sizes = block.markov_rank, width, vocab, config.draft_vocab_size
        self.markov_head = MarkovHead(block.markov_type, *sizes) if block.markov_rank else None
        self.candidate_selector = CandidateSelector(block.selector_rank, width, vocab) if block.selector_rank else None

    def project(self, taps_TX: Tensor) -> Tensor:
        context_TH: Tensor = self.hidden_norm(self.fc(taps_TX))
        return context_TH

    def store(self, context_TH: Tensor, positions_T: Tensor, memory: Memory) -> None:
        rotation = self.rotary(positions_T, context_TH.dtype)
        for layer in self.layers:
            layer.self_attn.store(context_TH, rotation, memory)  # type: ignore[operator, union-attr]

    def block(self, token_ids_T: Tensor, positions_T: Tensor, by_causality: dict[bool, Memory]) -> Tensor:
        """Return [T, H] states of whole blocks.

        by_causality: metadata of layers whose rows see earlier rows only, or all.
        """
        state_TH = self.embed(token_ids_T) * self.block_config.embedding_scale
        rotation = self.rotary(positions_T, state_TH.dtype)
        for layer, is_causal in zip(self.layers, self.block_config.is_causal, strict=True):
            state_TH = layer(state_TH, rotation, by_causality[is_causal])
        normed_TH: Tensor = self.norm(state_TH)
        return normed_TH

    def rows(self, lengths: Sequence[int]) -> Ints:
        """Return the rows that `sampler` needs; lengths: used draft rows of each block."""
        size = self.block_config.size
        first = int(not self.block_config.from_anchor)
        rows = [number * size + first + row for number, length in enumerate(lengths) for row in range(length)]
        if self._reads_anchors:
            rows += [number * size for number in range(len(lengths))]
        return np.array(rows)

    @property
    def _reads_anchors(self) -> bool:
        """Whether the sampler reads states of anchors, which draft nothing themselves."""
        return self.block_config.markov_type == "rnn" and not self.block_config.from_anchor

    def sampler(self, output: HeadOutput, lengths: Sequence[int], vocab_size: int) -> ChainSampler:
        """Return the sampler of whole blocks. output: of the pass, at `rows`."""
        num_rows = sum(lengths)
        state_SH = output.state_NH[:num_rows]
        logits_SV = self.scaled(output.product_NX[:num_rows])
        if self.markov_head is not None:
            first_SH = None
            if self._reads_anchors:
                anchors = zip(output.state_NH[num_rows:], lengths, strict=True)
                first_SH = torch.cat([state_H.expand(length, -1) for state_H, length in anchors])
            return Markov(self, state_SH, first_SH, logits_SV, vocab_size)
        logits_SV = self.in_target_tokens(logits_SV, vocab_size)
        if self.candidate_selector is not None:
            return Selected(self.candidate_selector, state_SH, logits_SV, self.block_config.num_candidates)
        return Marginals(logits_SV)
