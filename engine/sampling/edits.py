"""Changes of a request's logits that depend on its text: bias, penalties, masks. Before temperature and filters.

A *context* is where a law is needed: after a text, and after a path of drafted tokens below it; every node of every
branch has a context of its own, and counts are those of its own path. Order, as vLLM has it: logit_bias; repetition
penalty (tokens of prompt and answer: a positive logit is divided, a negative one multiplied); frequency and presence
penalties (tokens of the answer); then masks: allowed tokens, bad words, the grammar, no end before min_tokens.
Where the masks leave nothing, the logits stay as they were.

Not for: temperature, top-k, top-p, min-p (`law.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.plan import LogitContext
from engine.request import Sampling

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class NodeContext:
    """What the law at one node depends on, besides its logits."""

    sampling: Sampling
    text: LogitContext
    path: tuple[int, ...] = ()
    """Drafted tokens after the text."""

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer before this context."""
        return len(self.text.tokens) - self.text.num_prompt + len(self.path)


def edit(logits_NV: Tensor, contexts: Sequence[NodeContext | None]) -> Tensor:
    """The logits that the laws are made of; rows with None are left alone."""
    if not any(contexts):
        return logits_NV
    device, vocab_size = logits_NV.device, logits_NV.shape[1]
    edited_NV = logits_NV.float().clone()
    biased = [(row, *bias) for row, context in enumerate(contexts) if context for bias in context.sampling.logit_bias]
    if biased:
        rows, tokens, values = zip(*biased, strict=True)
        index = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
        edited_NV.index_put_(index, torch.tensor(values, dtype=torch.float32, device=device), accumulate=True)
    if any(context and context.sampling.has_penalties for context in contexts):
        rows_E, tokens_E, values_E4 = (torch.from_numpy(part).to(device) for part in _penalised(contexts, vocab_size))
        repetition, frequency, presence, count = values_E4.float().T
        logit = edited_NV[rows_E, tokens_E]
        logit = torch.where(logit > 0, logit / repetition, logit * repetition)
        edited_NV[rows_E, tokens_E] = logit - frequency * count - presence * (count > 0)
    # A sum beyond float32 would make the law not a number.
    edited_NV.clamp_(max=_LARGEST)
    masks = _masks(contexts, vocab_size)
    if masks:
        masked = list(masks)
        allowed_MV = torch.from_numpy(np.stack(list(masks.values()))).to(device)
        masked_MV = edited_NV[masked].masked_fill(~allowed_MV, -torch.inf)
        possible_M1 = (masked_MV.amax(1) > -torch.inf).unsqueeze(1)
        edited_NV[masked] = torch.where(possible_M1, masked_MV, logits_NV[masked].float())
    return edited_NV


def _penalised(contexts: Sequence[NodeContext | None], vocab_size: int) -> tuple[Ints, Ints, Numbers]:
    """(row, token, [repetition, frequency, presence, times in the answer]) for every token that a penalty falls on.

    A text is counted once for all its contexts; then the tokens of each context's path are added.
    """
    texts: dict[int, tuple[Ints, Numbers]] = {}
    penalised = [(row, context) for row, context in enumerate(contexts) if context and context.sampling.has_penalties]
    parts = []
    for _, context in penalised:
        if id(context.text) not in texts:
            texts[id(context.text)] = _counts(context.text)
        parts.append(texts[id(context.text)])
        parts.append((np.array(context.path, dtype=np.int64), np.ones(len(context.path))))
    tokens_E, times_E = (np.concatenate(part) for part in zip(*parts, strict=True))
    place_E = np.repeat(np.arange(len(parts)) // 2, [len(tokens) for tokens, _ in parts])
    # A token of the path may be one of the text, too.
    keys_E, entry_E = np.unique(place_E * vocab_size + tokens_E, return_inverse=True)
    place_E, tokens_E = np.divmod(keys_E, vocab_size)
    strength = np.array([_strength(context.sampling) for _, context in penalised])
    rows = np.array([row for row, _ in penalised])
    return rows[place_E], tokens_E, np.column_stack([strength[place_E], np.bincount(entry_E, times_E)])


def _strength(sampling: Sampling) -> tuple[float, float, float]:
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty


def _counts(text: LogitContext) -> tuple[Ints, Numbers]:
    """(tokens of the whole text, how often each is in the answer)."""
    text_T = np.array(text.tokens, dtype=np.int64)
    tokens_E, entry_T = np.unique(text_T, return_inverse=True)
    return tokens_E, np.bincount(entry_T[text.num_prompt :], minlength=len(tokens_E)).astype(np.float64)


def _masks(contexts: Sequence[NodeContext | None], vocab_size: int) -> dict[int, Bools]:
    """[V] tokens that may come next, by row, where not all may."""
    following = _followed(contexts)
    masks = {}
    for row, context in enumerate(contexts):
        allowed = _allowed(context, vocab_size, following.get(row)) if context is not None else None
        if allowed is not None:
            masks[row] = allowed
    return masks


def _followed(contexts: Sequence[NodeContext | None]) -> dict[int, Bools | None]:
    """What the grammars allow, by row. Each is asked once for all its rows, and all are asked before any is awaited."""
    rows: dict[int, list[int]] = {}
    for row, context in enumerate(contexts):
        if context is not None and context.text.grammar is not None:
            rows.setdefault(id(context.text.grammar), []).append(row)
    asked = []
    for of_one in rows.values():
        own = [context for row in of_one if (context := contexts[row]) is not None]
        text, grammar = own[0].text, own[0].text.grammar
        assert grammar is not None
        asked.append((of_one, grammar.masks(text.tokens[text.num_prompt :], [context.path for context in own])))
    return {row: mask for of_one, wait in asked for row, mask in zip(of_one, wait(), strict=True)}


def _allowed(context: NodeContext, vocab_size: int, following: Bools | None) -> Bools | None:
    """[V] tokens that may come next, None for all; where grammar and other masks leave nothing, the grammar counts.

    following: what its grammar allows.
    """
    sampling, text = context.sampling, context.text
    holds_back = context.num_emitted < text.min_tokens
    if not (sampling.allowed_token_ids or sampling.bad_words or holds_back or following is not None):
        return None
    allowed = np.ones(vocab_size, dtype=bool)
    if sampling.allowed_token_ids:
        allowed[:] = False
        allowed[list(sampling.allowed_token_ids)] = True
    if sampling.bad_words:
        longest = max(len(word) for word in sampling.bad_words)
        tail = (*text.tokens[-longest:], *context.path)
        last = [word[-1] for word in sampling.bad_words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]
        allowed[last] = False
    if holds_back:
        allowed[[token for token in text.ends if 0 <= token < vocab_size]] = False
    if following is not None:
        both = allowed & following
        allowed = both if both.any() else following
    return allowed
