"""Losses of a head against the target's distributions, at every depth that it drafts.

Depth k of a chain counts only if the drafts above it are accepted, so its weight falls by `DECAY`
with each depth. A head with a smaller vocabulary learns the target's distribution among its own
tokens. Its acceptance counts the target's whole distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from research.distill.memories import ChainMemory
from research.distill.states import TextRows

DECAY = 0.8


class Teacher(NamedTuple):
    """The target's distributions at some tokens."""

    probs_NV: Tensor
    """Among the head's tokens, whose sum is 1."""
    entropy_N: Tensor
    covered_N: Tensor
    """Probability of the head's tokens in the whole distribution."""

    def at(self, rows_N: Tensor) -> Teacher:
        """Return some of the distributions."""
        return self if rows_N.all() else Teacher(*(part[rows_N] for part in self))


@dataclass(frozen=True)
class TextBatch:
    """Texts with the target's states."""

    token_ids_RL: Tensor
    counts_RL: Tensor
    """Whether the distribution below a token is learned."""
    taps_RLX: Tensor
    last_RLD: Tensor
    """Target's states after the final norm."""
    is_whole: bool
    """Whether the target's distribution over all its tokens is computed: acceptance needs it, and
    training does not.
    """

    @staticmethod
    def of(rows: TextRows, device: torch.device, is_whole: bool = False) -> TextBatch:
        """Return texts on a device."""
        taps, last = (part.to(device, torch.float32) for part in (rows.taps_RLX, rows.last_RLD))
        return TextBatch(rows.token_ids_RL.to(device).long(), rows.counts_RL.to(device), taps, last, is_whole)

    @torch.no_grad()
    def teacher(self, head: Any, rows_N: Tensor) -> Teacher:
        """Return the target's distributions below tokens, by their places among all texts."""
        last_ND = self.last_RLD.flatten(0, 1)[rows_N]
        with torch.autocast(last_ND.device.type, enabled=False):
            logits_NV = linear(last_ND, head.lm_head.weight if head.lm_head is not None else head.shared.head_VD)
            log_sum_N1 = logits_NV.logsumexp(-1, keepdim=True)
            probs_NV = (logits_NV - log_sum_N1).exp()
            entropy_N = log_sum_N1.squeeze(1) - (probs_NV * logits_NV).sum(-1)
            covered_N = torch.ones_like(entropy_N)
            if self.is_whole and head.lm_head is not None:
                covered_N = (log_sum_N1.squeeze(1) - linear(last_ND, head.shared.head_VD).logsumexp(-1)).exp()
        return Teacher(probs_NV, entropy_N, covered_N)


@dataclass(frozen=True)
class Losses:
    """One loss, and by depth the acceptance of one drafted token.

    While it is trained, that among its own tokens.
    """

    loss: Tensor
    acceptance_L: Tensor

    @staticmethod
    def over_depths(parts: list[tuple[Tensor, Tensor]]) -> Losses:
        """Weighted mean; parts: (loss, acceptance) by depth."""
        weights = [DECAY**depth for depth in range(len(parts))]
        loss = sum(weight * part for weight, (part, _) in zip(weights, parts, strict=True)) / sum(weights)
        assert isinstance(loss, Tensor)
        return Losses(loss, torch.stack([acceptance for _, acceptance in parts]).detach())


def distillation_loss(student_NV: Tensor, teacher: Teacher, tv_weight: float) -> tuple[Tensor, Tensor]:
    """KL(target || draft) mixed with the total variation distance.

    Also the mean acceptance, 1 - TV.

    The total variation is one minus the probability that speculative sampling accepts a drafted
    token. The share of KL that always stays keeps some mass on the target's less likely tokens.
    """
    log_q_NV, p_NV = student_NV.float().log_softmax(-1), teacher.probs_NV
    q_NV, count = log_q_NV.exp(), max(1, len(p_NV))
    divergence = -((p_NV * log_q_NV).sum() + teacher.entropy_N.sum()) / count
    variation = 0.5 * (p_NV - q_NV).abs().sum() / count
    accepted = 1 - variation
    if not student_NV.requires_grad:
        accepted = torch.minimum(p_NV * teacher.covered_N.unsqueeze(-1), q_NV).sum() / count
    return (1 - tv_weight) * divergence + tv_weight * variation, accepted


def eagle_losses(head: Any, texts: TextBatch, draft_length: int, tv_weight: float) -> Losses:
    """Return the losses of EAGLE-3's training-time test.

    Below each token of a text a chain of the text's own tokens is drafted.
    At the first depth a row reads the target's state before its token, at the further ones the
    head's own.
    """
    num_texts, length = texts.token_ids_RL.shape
    flat_T = texts.token_ids_RL.flatten()
    positions_T = torch.arange(length, device=flat_T.device).repeat(num_texts)
    counted_N = texts.counts_RL.flatten().nonzero().squeeze(1)
    teacher = texts.teacher(head, counted_N)
    memory = ChainMemory(num_texts)
    state_TH = head.project(_after(texts.taps_RLX).flatten(0, 1))
    parts = []
    for depth in range(draft_length):
        state_TH = head(flat_T, state_TH, positions_T, memory)
        has_chain_N = positions_T[counted_N] > depth
        student_NV = head.own_logits(state_TH[counted_N[has_chain_N]])
        parts.append(distillation_loss(student_NV, teacher.at(has_chain_N), tv_weight))
        state_TH = _after(state_TH.unflatten(0, (num_texts, length))).flatten(0, 1)
    return Losses.over_depths(parts)


def _after(part_RLX: Tensor) -> Tensor:
    """Values of the token before; zeros at a text's first."""
    return torch.cat([torch.zeros_like(part_RLX[:, :1]), part_RLX[:, :-1]], 1)
