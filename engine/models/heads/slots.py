"""Samplers of chains after one pass of a head: a *slot* is a row of the pass that drafts one token.

Slot l of a text drafts the token at depth l. A sampler computes logits below any drafted node from the results of the
pass, so further chains need no further pass.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


class SlotSampler(Protocol):
    """Computes logits below nodes."""

    def below(self, slot_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:
        """Return [N, V] logits below nodes.

        slot_N: their slots; previous_N: their tokens, or below a root the text's last; parent_N: indices of their
        parents in the previous call, None for roots.
        """


class Marginals:
    """Logits that do not depend on the tokens before."""

    def __init__(self, logits_SV: Tensor) -> None:
        self._logits_SV = logits_SV

    def below(self, slot_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return [N, V] logits below nodes."""
        return self._logits_SV[slot_N]


class MarkovHead(nn.Module):
    """A term of low rank that depends on the previous token: vanilla, gated by the slot's state, or recurrent (rnn)."""

    def __init__(self, kind: str, rank: int, width: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self._kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def start(self, count: int) -> Tensor:
        """Return [N, r] the memory before the first slot."""
        return self.markov_w1.weight.new_zeros(count, self.markov_w1.embedding_dim)

    def forward(self, memory_NR: Tensor, previous_N: Tensor, state_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return ([N, draft vocabulary] the term, [N, r] the memory after it)."""
        before_NR = self.markov_w1(previous_N)
        if self._kind == "gated":
            before_NR = before_NR * self.gate_proj(torch.cat([state_NH, before_NR], -1)).sigmoid()
        elif self._kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([memory_NR, before_NR, state_NH], -1)).chunk(3, -1)
            memory_NR = torch.lerp(candidate.tanh(), memory_NR, gate.sigmoid())
            before_NR = output.tanh()
        return self.markov_w2(before_NR), memory_NR


class Markov:
    """Logits with the term of a `MarkovHead`."""

    def __init__(self, head: Any, state_SH: Tensor, first_SH: Tensor | None, vocab_size: int) -> None:
        """first_SH: states of the anchors' rows, by slot, if these rows draft nothing themselves."""
        self._head, self._markov, self._vocab_size = head, head.markov_head, vocab_size
        self._state_SH, self._first_SH = state_SH, first_SH
        self._logits_SV = head.own_logits(state_SH)
        self._memory_NR = torch.empty(0)

    def below(self, slot_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:
        """Return [N, V] logits below nodes."""
        if parent_N is not None:
            memory_NR = self._memory_NR[parent_N]
        else:
            memory_NR = self._markov.start(len(slot_N))
            if self._first_SH is not None:
                _, memory_NR = self._markov(memory_NR, previous_N, self._first_SH[slot_N])
        term_NV, self._memory_NR = self._markov(memory_NR, previous_N, self._state_SH[slot_N])
        logits_NV: Tensor = self._head.in_target_tokens(self._logits_SV[slot_N] + term_NV.float(), self._vocab_size)
        return logits_NV


class CandidateSelector(nn.Module):
    """Weighs pairs of a token and a candidate after it."""

    def __init__(self, rank: int, width: int, vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def forward(self, state_NH: Tensor, previous_N: Tensor, candidate_NC: Tensor) -> Tensor:
        """Return [N, C] weights of the candidates."""
        query_NR = embedding(previous_N, self.predecessor_codebook) * self.hidden_projection(state_NH)
        successor_NCR = embedding(candidate_NC, self.successor_codebook)
        weight_NC: Tensor = (successor_NCR @ query_NR.unsqueeze(-1)).squeeze(-1)
        return weight_NC


class Selected:
    """Logits of each slot's likeliest tokens, with the weights of a `CandidateSelector`; no other token is drafted."""

    def __init__(self, selector: CandidateSelector, state_SH: Tensor, logits_SV: Tensor, count: int) -> None:
        self._selector, self._state_SH, self._vocab_size = selector, state_SH, logits_SV.shape[1]
        self._logits_SC, self._candidate_SC = logits_SV.topk(count, dim=-1)

    def below(self, slot_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return [N, V] logits below nodes."""
        candidate_NC = self._candidate_SC[slot_N]
        weight_NC = self._selector(self._state_SH[slot_N], previous_N, candidate_NC)
        logits_NC = self._logits_SC[slot_N] + weight_NC.float()
        nowhere_NV: Tensor = logits_NC.new_full((len(slot_N), self._vocab_size), -torch.inf)
        return nowhere_NV.scatter_(1, candidate_NC, logits_NC)
