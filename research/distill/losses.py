"""Losses of a head against the target's distributions, at every depth that it drafts.

Depth k of a chain counts only if the drafts above it are accepted, so its weight falls by `DECAY`
with each depth. A head with a smaller vocabulary learns the target's distribution among its own
tokens. Its acceptance counts the target's whole distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from research.distill.memories import BlockMemory, ChainMemory
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
    """One loss, and by depth the acceptance of one drafted token: while it is trained, that among
    its own tokens.
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


LossOf = Callable[[Any, TextBatch, int, float, torch.Generator], Losses]


def distillation_loss(student_NV: Tensor, teacher: Teacher, tv_weight: float) -> tuple[Tensor, Tensor]:
    """KL(target || draft) mixed with the total variation distance; also the mean acceptance, 1 -
    TV.

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


def eagle_losses(head: Any, texts: TextBatch, draft_length: int, tv_weight: float, _: torch.Generator) -> Losses:
    """EAGLE-3's training-time test: below each token of a text a chain of the text's own tokens is
    drafted.

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


def block_losses(
    head: Any, texts: TextBatch, draft_length: int, tv_weight: float, generator: torch.Generator
) -> Losses:
    """Blocks after anchors at even distances: each slot drafts the next token, given the text's
    token before it.
    """
    num_texts, length = texts.token_ids_RL.shape
    device, size = texts.token_ids_RL.device, head.block_config.size
    step = -(-size // 2)
    anchors_RA = anchors_of(texts.counts_RL, step, int(torch.randint(step, (), generator=generator)))
    memory = BlockMemory(anchors_RA, size, head.block_config.is_causal[0])
    context_positions_T = torch.arange(length, device=device).repeat(num_texts)
    head.store(head.project(texts.taps_RLX.flatten(0, 1)), context_positions_T, memory)
    index_RAB = anchors_RA.unsqueeze(-1) + torch.arange(size, device=device)
    # Rows of one flat text; slots past a text's end count nowhere.
    place_RAB = index_RAB.clamp(max=length - 1) + length * torch.arange(num_texts, device=device)[:, None, None]
    counts_RAB = texts.counts_RL.flatten()[place_RAB] & (index_RAB < length)
    text_tokens_RAB = texts.token_ids_RL.flatten()[place_RAB]
    tokens_RAB = torch.full_like(text_tokens_RAB, head.config.mask_token_id)
    tokens_RAB[..., 0] = text_tokens_RAB[..., 0]
    state_TH = head.block(tokens_RAB.flatten(), index_RAB.flatten(), dict.fromkeys((False, True), memory))
    state_RABH = state_TH.unflatten(0, index_RAB.shape)
    parts = []
    for depth in range(draft_length):
        counted_RA = counts_RAB[:, :, depth]
        state_NH, previous_N = (part[:, :, depth][counted_RA] for part in (state_RABH, text_tokens_RAB))
        term_NV, _memory = head.markov_head(head.markov_head.start(len(state_NH)), previous_N, state_NH)
        student_NV = head.own_logits(state_NH) + term_NV.float()
        parts.append(distillation_loss(student_NV, texts.teacher(head, place_RAB[:, :, depth][counted_RA]), tv_weight))
    return Losses.over_depths(parts)


def anchors_of(counts_RL: Tensor, step: int, first: int) -> Tensor:
    """Return [R, A] places from which blocks are drafted: of the places that count in a text every
    `step`-th one.

    The target has no state before a text's first token. A text with fewer places has anchors past
    its end.
    """
    places = [1 + row[1:].nonzero().squeeze(1) for row in counts_RL]
    chosen = [place[min(first, len(place) // 2) :: step] for place in places]
    most, length = max(map(len, chosen)), counts_RL.shape[1]
    return torch.stack([pad(one, (0, most - len(one)), value=length) for one in chosen])


LOSSES: dict[str, LossOf] = {"eagle3": eagle_losses, "dspark": block_losses}
"""Losses of each type of head."""


def _after(part_RLX: Tensor) -> Tensor:
    """Values of the token before; zeros at a text's first."""
    return torch.cat([torch.zeros_like(part_RLX[:, :1]), part_RLX[:, :-1]], 1)
