"""Losses of a head against the target's distributions, at every depth that it drafts.

Depth k of a chain counts only if the drafts above it are accepted, so its weight falls by `DECAY` with each depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from distill.memories import BlockMemory, ChainMemory

DECAY = 0.8


@dataclass(frozen=True)
class TextBatch:
    """Texts with the target's states."""

    token_ids_RL: Tensor
    taps_RLX: Tensor
    last_RLD: Tensor
    """Target's states after the final norm."""

    @staticmethod
    def of(tensors: dict[str, Tensor], device: torch.device) -> TextBatch:
        """Rows of a file of `Texts`."""
        taps, last = (tensors[name].to(device, torch.float32) for name in ("taps", "last"))
        return TextBatch(tensors["token_ids"].to(device).long(), taps, last)


@dataclass(frozen=True)
class Losses:
    """One loss, and by depth the acceptance of one drafted token, 1 - TV."""

    loss: Tensor
    acceptance_L: Tensor

    @staticmethod
    def over_depths(parts: list[tuple[Tensor, Tensor]]) -> Losses:
        """Weighted mean; parts: (loss, acceptance) by depth."""
        weights = [DECAY**depth for depth in range(len(parts))]
        loss = sum(weight * part for weight, (part, _) in zip(weights, parts, strict=True)) / sum(weights)
        assert isinstance(loss, Tensor)
        return Losses(loss, torch.stack([acceptance for _, acceptance in parts]).detach())


LossOf = Callable[[Any, TextBatch, int, float, torch.Generator], Losses]


def distillation_loss(student: Tensor, teacher: Tensor, weights: Tensor, tv_weight: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target || draft) mixed with the total variation distance; also the mean acceptance, 1 - TV.

    The total variation is one minus the probability that speculative sampling accepts a drafted token.
    The share of KL that always stays keeps some mass on the target's less likely tokens.
    """
    log_p, log_q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    p = log_p.exp()
    weights = weights / weights.sum()
    divergence = ((p * (log_p - log_q)).sum(-1) * weights).sum()
    variation = (0.5 * (p - log_q.exp()).abs().sum(-1) * weights).sum()
    return (1 - tv_weight) * divergence + tv_weight * variation, 1 - variation


def eagle_losses(head: Any, texts: TextBatch, draft_length: int, tv_weight: float, _: torch.Generator) -> Losses:
    """EAGLE-3's training-time test: below each token of a text a chain of the text's own tokens is drafted.

    At the first depth a row reads the target's state before its token, at the further ones the head's own.
    """
    num_texts, length = texts.token_ids_RL.shape
    flat_T = texts.token_ids_RL.flatten()
    positions_T = torch.arange(length, device=flat_T.device).repeat(num_texts)
    teacher_TV = _teacher(head, texts.last_RLD.flatten(0, 1))
    memory = ChainMemory(num_texts)
    state_TH = head.project(_after(texts.taps_RLX).flatten(0, 1))
    share = torch.tensor(tv_weight, device=flat_T.device)
    parts = []
    for depth in range(draft_length):
        state_TH = head(flat_T, state_TH, positions_T, memory)
        counts_T = (positions_T > depth).float()
        parts.append(distillation_loss(head.logits(state_TH, teacher_TV.shape[1]), teacher_TV, counts_T, share))
        state_TH = _after(state_TH.unflatten(0, (num_texts, length))).flatten(0, 1)
    return Losses.over_depths(parts)


def block_losses(
    head: Any, texts: TextBatch, draft_length: int, tv_weight: float, generator: torch.Generator
) -> Losses:
    """Blocks after anchors at even distances: each slot drafts the next token, given the text's token before it."""
    num_texts, length = texts.token_ids_RL.shape
    device, size = texts.token_ids_RL.device, head.block_config.size
    step = -(-size // 2)
    first = 1 + int(torch.randint(step, (), generator=generator))
    anchors_A = torch.arange(first, length - size + 1, step, device=device)
    memory = BlockMemory(anchors_A.expand(num_texts, -1), size, head.block_config.is_causal[0])
    context_positions_T = torch.arange(length, device=device).repeat(num_texts)
    head.store(head.project(texts.taps_RLX.flatten(0, 1)), context_positions_T, memory)
    index_AB = anchors_A[:, None] + torch.arange(size, device=device)
    text_tokens_RAB = texts.token_ids_RL[:, index_AB]
    tokens_RAB = torch.full_like(text_tokens_RAB, head.config.mask_token_id)
    tokens_RAB[..., 0] = text_tokens_RAB[..., 0]
    positions_T = index_AB.expand(num_texts, -1, -1).flatten()
    state_TH = head.block(tokens_RAB.flatten(), positions_T, dict.fromkeys((False, True), memory))
    state_RABH = state_TH.unflatten(0, (num_texts, *index_AB.shape))
    share = torch.tensor(tv_weight, device=device)
    parts = []
    for depth in range(draft_length):
        state_NH, previous_N = (part[:, :, depth].flatten(0, 1) for part in (state_RABH, text_tokens_RAB))
        term_NV, _memory = head.markov_head(head.markov_head.start(len(state_NH)), previous_N, state_NH)
        student_NV = head.own_logits(state_NH) + term_NV.float()
        teacher_NV = _teacher(head, texts.last_RLD[:, index_AB[:, depth]].flatten(0, 1))
        parts.append(distillation_loss(student_NV, teacher_NV, torch.ones(len(state_NH), device=device), share))
    return Losses.over_depths(parts)


LOSSES: dict[str, LossOf] = {"eagle3": eagle_losses, "dspark": block_losses}
"""Losses of each type of head."""


@torch.no_grad()
def _teacher(head: Any, last_TD: Tensor) -> Tensor:
    """[T, V] the target's logits."""
    return linear(last_TD, head.shared.head_VD).float()


def _after(part_RLX: Tensor) -> Tensor:
    """Values of the token before; zeros at a text's first."""
    return torch.cat([torch.zeros_like(part_RLX[:, :1]), part_RLX[:, :-1]], 1)
