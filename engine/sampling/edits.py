"""Changes of a request's logits that depend on its text: bias, penalties, masks. Before temperature and filters.

A *place* is where a law is needed: after a text, and after a path of drafted tokens below it; every node of every
branch has a place of its own, and counts are those of its own path. Order, as vLLM has it: logit_bias; repetition
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

from engine.plan import Text
from engine.request import Sampling

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Place:
    """Where a law is needed."""

    sampling: Sampling
    text: Text
    path: tuple[int, ...] = ()
    """Drafted tokens after the text."""

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer before this place."""
        return len(self.text.tokens) - self.text.num_prompt + len(self.path)


class _Entries:
    """Values at (row, token), gathered over all places."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.tokens: list[Ints] = []
        self.values: list[Numbers] = []

    def add(self, row: int, tokens: Ints, values: Numbers) -> None:
        """Values of some tokens of one row; [tokens] or [tokens, several]."""
        self.rows.append(np.full(len(tokens), row, dtype=np.int64))
        self.tokens.append(tokens)
        self.values.append(values)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, tokens, values)."""
        arrays = (np.concatenate(self.rows), np.concatenate(self.tokens), np.concatenate(self.values))
        rows, tokens, values = (torch.from_numpy(array).to(device) for array in arrays)
        return rows, tokens, values


def edit(logits_NV: Tensor, places: Sequence[Place | None]) -> Tensor:
    """The logits that the laws are made of; a row without a place is left alone."""
    if not any(places):
        return logits_NV
    vocab_size = logits_NV.shape[1]
    biases, penalties = _Entries(), _Entries()
    masked: list[int] = []
    masks: list[Bools] = []
    following = _followed(places)
    for row, place in enumerate(places):
        if place is None:
            continue
        if place.sampling.logit_bias:
            biased, added = zip(*place.sampling.logit_bias, strict=True)
            biases.add(row, np.array(biased, dtype=np.int64), np.array(added, dtype=np.float64))
        if place.sampling.has_penalties:
            tokens_T, counts_T = _counts(place)
            strength = np.tile(_strength(place.sampling), (len(tokens_T), 1))
            penalties.add(row, tokens_T, np.column_stack([strength, counts_T]))
        allowed = _allowed(place, vocab_size, following.get(row))
        if allowed is not None:
            masked.append(row)
            masks.append(allowed)
    edited_NV = logits_NV.float().clone()
    if biases:
        rows, tokens, values = biases.tensors(logits_NV.device)
        edited_NV.index_put_((rows, tokens), values.float(), accumulate=True)
    if penalties:
        rows, tokens, values = penalties.tensors(logits_NV.device)
        repetition, frequency, presence, count = values.float().T
        logit = edited_NV[rows, tokens]
        logit = torch.where(logit > 0, logit / repetition, logit * repetition)
        edited_NV[rows, tokens] = logit - frequency * count - presence * (count > 0)
    # A sum beyond float32 would make the law not a number.
    edited_NV.clamp_(max=_LARGEST)
    if masked:
        allowed_MV = torch.from_numpy(np.stack(masks)).to(logits_NV.device)
        masked_MV = edited_NV[masked].masked_fill(~allowed_MV, -torch.inf)
        possible_M1 = (masked_MV.amax(1) > -torch.inf).unsqueeze(1)
        edited_NV[masked] = torch.where(possible_M1, masked_MV, logits_NV[masked].float())
    return edited_NV


def _strength(sampling: Sampling) -> Numbers:
    return np.array([sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty])


def _counts(place: Place) -> tuple[Ints, Numbers]:
    """(tokens of the whole text, how often each is in the answer)."""
    answer = (*place.text.tokens[place.text.num_prompt :], *place.path)
    tokens_T = np.unique(np.array((*place.text.tokens, *place.path), dtype=np.int64))
    used, times = np.unique(np.array(answer, dtype=np.int64), return_counts=True)
    counts_T = np.zeros(len(tokens_T))
    counts_T[np.searchsorted(tokens_T, used)] = times
    return tokens_T, counts_T


def _followed(places: Sequence[Place | None]) -> dict[int, Bools | None]:
    """What the grammars allow, by row: each is asked once for all its places, and all before any answer is awaited."""
    rows: dict[int, list[int]] = {}
    for row, place in enumerate(places):
        if place is not None and place.text.grammar is not None:
            rows.setdefault(id(place.text.grammar), []).append(row)
    asked = []
    for of_one in rows.values():
        own = [place for row in of_one if (place := places[row]) is not None]
        text, grammar = own[0].text, own[0].text.grammar
        assert grammar is not None
        asked.append((of_one, grammar.masks(text.tokens[text.num_prompt :], [place.path for place in own])))
    return {row: mask for of_one, wait in asked for row, mask in zip(of_one, wait(), strict=True)}


def _allowed(place: Place, vocab_size: int, following: Bools | None) -> Bools | None:
    """[V] tokens that may come next, None for all; where grammar and other masks leave nothing, the grammar counts.

    following: what its grammar allows.
    """
    sampling, text = place.sampling, place.text
    holds_back = place.num_emitted < text.min_tokens
    if not (sampling.allowed_token_ids or sampling.bad_words or holds_back or following is not None):
        return None
    allowed = np.ones(vocab_size, dtype=bool)
    if sampling.allowed_token_ids:
        allowed[:] = False
        allowed[list(sampling.allowed_token_ids)] = True
    if sampling.bad_words:
        longest = max(len(word) for word in sampling.bad_words)
        tail = (*text.tokens[-longest:], *place.path)
        last = [word[-1] for word in sampling.bad_words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]
        allowed[last] = False
    if holds_back:
        allowed[[token for token in text.ends if 0 <= token < vocab_size]] = False
    if following is not None:
        both = allowed & following
        allowed = both if both.any() else following
    return allowed
