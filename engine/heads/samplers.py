"""Samplers of chains after one pass of a head; each *draft row* drafts one token.

The draft row of depth l drafts the token at that depth. A sampler computes logits below any drafted
node from the results of the pass, so further chains need no further pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


class Tables(NamedTuple):
    """Logits of all draft rows below all tokens that the draft row before may draft."""

    logits_SPX: Tensor
    """[S, P, X] float32; P is 1 if the previous token makes no difference."""
    token_SX: Tensor | None
    """[S, X] Tokens that a draft row may draft, ascending; None is the vocabulary."""


class ChainSampler:
    """Computes logits below nodes."""

    def below(self, draft_row_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:
        """Return [N, V] logits below nodes.

        draft_row_N: their draft rows; previous_N: their tokens, or below a root the text's last;
        parent_N: indices of their parents in the previous call, None for roots.
        """
        raise NotImplementedError

    def tables(self, first_R: Tensor, last_R: Tensor) -> Tables:
        """Return the logits of all draft rows at once, if `HeadConfig.has_tables`.

        first_R: the first draft row of each text; last_R: the last token of each.
        """
        raise NotImplementedError


class Marginals(ChainSampler):
    """Logits that do not depend on the tokens before."""

    def __init__(self, logits_SV: Tensor) -> None:
        self._logits_SV = logits_SV

    def tables(self, first_R: Tensor, last_R: Tensor) -> Tables:  # noqa: ARG002
        return Tables(self._logits_SV.unsqueeze(1), None)

    def below(self, draft_row_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:  # noqa: ARG002
        return self._logits_SV[draft_row_N]


class MarkovHead(nn.Module):
    """A low-rank term of the previous token: vanilla, gated by the row, or recurrent (rnn)."""

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
        """Return [N, r] the memory before the first draft row."""
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


class Markov(ChainSampler):
    """Logits with the term of a `MarkovHead`."""

    def __init__(
        self, head: Any, state_SH: Tensor, first_SH: Tensor | None, logits_SV: Tensor, vocab_size: int
    ) -> None:
        """first_SH: states of anchors by draft row, if the memory begins there.

        logits_SV: [S, draft vocabulary] without the term.
        """
        self._head, self._markov, self._vocab_size = head, head.markov_head, vocab_size
        self._state_SH, self._first_SH = state_SH, first_SH
        self._logits_SV = logits_SV
        self._memory_NR = torch.empty(0)

    def below(self, draft_row_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:
        if parent_N is not None:
            memory_NR = self._memory_NR[parent_N]
        else:
            memory_NR = self._markov.start(len(draft_row_N))
            if self._first_SH is not None:
                _, memory_NR = self._markov(memory_NR, previous_N, self._first_SH[draft_row_N])
        term_NV, self._memory_NR = self._markov(memory_NR, previous_N, self._state_SH[draft_row_N])
        logits_NV: Tensor = self._head.in_target_tokens(
            self._logits_SV[draft_row_N] + term_NV.float(), self._vocab_size
        )
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
        return self.pairs(state_NH, previous_N.unsqueeze(1), candidate_NC).squeeze(1)

    def pairs(self, state_NH: Tensor, previous_NP: Tensor, candidate_NC: Tensor) -> Tensor:
        """Return [N, P, C] weights of the candidates below each of several tokens."""
        query_NPR = embedding(previous_NP, self.predecessor_codebook) * self.hidden_projection(state_NH).unsqueeze(1)
        weight_NPC: Tensor = query_NPR @ embedding(candidate_NC, self.successor_codebook).transpose(1, 2)
        return weight_NPC


class Selected(ChainSampler):
    """Logits of each draft row's likeliest tokens, weighted by a `CandidateSelector`."""

    def __init__(self, selector: CandidateSelector, state_SH: Tensor, logits_SV: Tensor, count: int) -> None:
        self._selector, self._state_SH, self._vocab_size = selector, state_SH, logits_SV.shape[1]
        self._count = count
        self._candidate_SC = logits_SV.topk(count, dim=-1).indices.sort(dim=-1).values
        self._logits_SC = logits_SV.gather(1, self._candidate_SC)

    def tables(self, first_R: Tensor, last_R: Tensor) -> Tables:
        previous_SC = self._candidate_SC.roll(1, 0).index_copy(0, first_R, last_R.unsqueeze(1).expand(-1, self._count))
        weight_SCX = self._selector.pairs(self._state_SH, previous_SC, self._candidate_SC)
        return Tables(self._logits_SC.unsqueeze(1) + weight_SCX.float(), self._candidate_SC)

    def below(self, draft_row_N: Tensor, previous_N: Tensor, parent_N: Tensor | None) -> Tensor:  # noqa: ARG002
        candidate_NC = self._candidate_SC[draft_row_N]
        weight_NC = self._selector(self._state_SH[draft_row_N], previous_N, candidate_NC)
        logits_NC = self._logits_SC[draft_row_N] + weight_NC.float()
        nowhere_NV: Tensor = logits_NC.new_full((len(draft_row_N), self._vocab_size), -torch.inf)
        return nowhere_NV.scatter_(1, candidate_NC, logits_NC)
