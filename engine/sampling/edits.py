"""Changes of logits that depend on a request's text: bias, penalties, masks.

A *context* is a place that needs a distribution: after a text, and after a path of drafted tokens
below it. Every node of every branch has a context, and counts are of its path alone. Order, as
in vLLM: logit_bias; repetition penalty (tokens of prompt and answer: a positive logit is divided, a
negative one multiplied); frequency and presence penalties (tokens of the answer); then masks:
allowed tokens, bad words, the grammar (a budget of thoughts is one, too), no end token before
min_tokens (unless the grammar demands one). If the masks leave no token, all tokens are equally
likely, and a request that reaches such a context is ended (`has_dead_end`).

Penalties count drafted tokens on their device, so that they never wait for it; bad words and
grammars need the tokens on the host.

Not for: temperature, top-k, top-p, min-p (`distribution.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import NOTHING_LEFT, RequestError
from engine.fixed_edits import FixedEdits
from engine.kernels.transfer import to_device_at_once
from engine.plan import LogitContext
from engine.request import Sampling

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

MASKED = RequestError(
    "the answer has come to a text after which bad_words, allowed_token_ids, min_tokens and the budget of thoughts "
    "leave no token; allow more",
    "bad_words",
    NOTHING_LEFT,
)
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class NodeContext:
    """Inputs of one node's distribution besides its logits."""

    sampling: Sampling
    text: LogitContext
    depth: int = 0
    path: tuple[int, ...] = ()
    """Tokens after the text, if masks depend on them (`plan.Row.needs_path`)."""

    @property
    def num_emitted(self) -> int:
        """Return the number of tokens of the answer before this context."""
        return len(self.text.tokens) - self.text.num_prompt + self.depth


def edit(logits_NV: Tensor, contexts: Sequence[NodeContext | None], path_ND: Tensor | None = None) -> Tensor:
    """Return the edited logits; rows whose context is None are unchanged.

    path_ND: the drafted tokens above each node, which penalties count, on the logits' device;
    entries beyond a node's depth are ignored. None if no node has any.
    """
    if not any(contexts):
        return logits_NV
    edited_NV, vocab_size = logits_NV.float().clone(), logits_NV.shape[1]
    fixed = {row: context.text.fixed for row, context in enumerate(contexts) if context}
    bias = [_Bias(np.array(rows), one.bias_tokens, one.bias_values) for one, rows in _by_identity(fixed)]
    penalised = [(row, context) for row, context in enumerate(contexts) if context and context.sampling.has_penalties]
    penalties = [_penalties(penalised, 0 if path_ND is None else path_ND.shape[1])] if penalised else []
    masks = _masks(contexts, fixed, vocab_size)
    parts = [*(one for one in bias if len(one.tokens)), *penalties, *([_as_arrays(masks)] if masks else ())]
    tensors = iter(to_device_at_once([array for part in parts for array in part], logits_NV.device))
    for part in parts:
        type(part)(*islice(tensors, len(part))).apply(edited_NV, path_ND)
    # A sum beyond float32 would give non-finite probabilities.
    return edited_NV.clamp_(max=_LARGEST)


class _Bias(NamedTuple):
    """Rows that share a bias: arrays of the host, then tensors, as other edits."""

    rows: Any
    tokens: Any
    values: Any

    def apply(self, edited_NV: Tensor, _path_ND: Tensor | None) -> None:
        edited_NV.index_put_((self.rows.unsqueeze(1), self.tokens), self.values, accumulate=True)


class _Masks(NamedTuple):
    """Rows that do not allow all tokens."""

    row_M: Any
    number_M: Any
    allowed_DV: Any
    """Different masks; most nodes of a request share one."""

    def apply(self, edited_NV: Tensor, _path_ND: Tensor | None) -> None:
        masked_MV = edited_NV[self.row_M].masked_fill_(~self.allowed_DV[self.number_M], -torch.inf)
        is_dead_M1 = (masked_MV.amax(1) == -torch.inf).unsqueeze(1)
        edited_NV[self.row_M] = masked_MV.masked_fill_(is_dead_M1, 0.0)


def _as_arrays(masks: dict[int, Bools]) -> _Masks:
    different = {id(mask): mask for mask in masks.values()}
    number_of = {name: number for number, name in enumerate(different)}
    numbers = [number_of[id(mask)] for mask in masks.values()]
    return _Masks(np.array(list(masks)), np.array(numbers), np.stack(list(different.values())))


def has_dead_end(text: LogitContext, emitted: Sequence[int], vocab_size: int) -> bool:
    """Return whether an emitted token was drawn where the masks leave none.

    Grammars detect their own dead ends (`engine.grammar`).
    """
    num_held = 0 if text.grammar else text.min_tokens - (len(text.tokens) - text.num_prompt)
    return text.fixed.has_dead_end(text.tokens, emitted, num_held, vocab_size)


class _Penalties(NamedTuple):
    """Penalised tokens: of a text, by row (E), and of the path above a row (X)."""

    strength_P3: Any
    """Repetition, frequency and presence penalty of each penalised row (P)."""
    row_E: Any
    place_E: Any
    """Penalised row."""
    token_E: Any
    count_E: Any
    row_X: Any
    place_X: Any
    at_X: Any
    """Index of the token in its path."""
    is_above_XD: Any
    text_X: Any
    text_S: Any
    """[S] Text of each counted token."""
    token_S: Any
    count_S: Any
    length_T: Any
    """[texts] Number of counted tokens."""

    def apply(self, edited_NV: Tensor, path_ND: Tensor | None) -> None:
        """Penalise tokens in place, for their occurrences in text and path."""
        counted_tokens, strength_E3 = (self.row_E, self.token_E), self.strength_P3[self.place_E]
        changed_E = _changed(edited_NV[counted_tokens], strength_E3, self.count_E)
        if path_ND is None or not len(self.row_X):
            edited_NV[counted_tokens] = changed_E
            return
        # Equal tokens of a path get the same value.
        token_X = path_ND[self.row_X, self.at_X]
        times_X = ((path_ND[self.row_X] == token_X.unsqueeze(1)) & self.is_above_XD).sum(1)
        table_TV = edited_NV.new_zeros((len(self.length_T), edited_NV.shape[1]))
        table_TV[self.text_S, self.token_S] = self.count_S
        times_X = times_X + table_TV[self.text_X, token_X]
        changed_X = _changed(edited_NV[self.row_X, token_X], self.strength_P3[self.place_X], times_X)
        edited_NV[counted_tokens] = changed_E
        edited_NV[self.row_X, token_X] = changed_X


def _penalties(penalised: Sequence[tuple[int, NodeContext]], longest: int) -> _Penalties:
    """Return the penalties of rows as arrays. longest: columns of the paths' tokens."""
    texts = list({id(context.text): context.text for _, context in penalised}.values())
    number_of = {id(text): number for number, text in enumerate(texts)}
    row_P = np.array([row for row, _ in penalised])
    text_P = np.array([number_of[id(context.text)] for _, context in penalised])
    depth_P = np.array([context.depth if longest else 0 for _, context in penalised])
    counts = [text.counts.of(text.tokens) for text in texts]
    length_T = np.array([len(tokens) for tokens, _ in counts])
    place_E = np.repeat(np.arange(len(penalised)), length_T[text_P])
    place_X = np.repeat(np.arange(len(penalised)), depth_P)
    return _Penalties(
        strength_P3=np.array([_strength(context.sampling) for _, context in penalised], np.float32),
        row_E=row_P[place_E],
        place_E=place_E,
        token_E=np.concatenate([counts[text][0] for text in text_P]),
        count_E=np.concatenate([counts[text][1] for text in text_P]),
        row_X=row_P[place_X],
        place_X=place_X,
        at_X=np.arange(len(place_X)) - (np.cumsum(depth_P) - depth_P)[place_X],
        is_above_XD=np.arange(longest) < depth_P[place_X, None],
        text_X=text_P[place_X],
        text_S=np.repeat(np.arange(len(texts)), length_T),
        token_S=np.concatenate([tokens for tokens, _ in counts]),
        count_S=np.concatenate([times for _, times in counts]),
        length_T=length_T,
    )


def _changed(logit_E: Tensor, strength_E3: Tensor, count_E: Tensor) -> Tensor:
    """Return [E] logits with their penalties; count_E: how often each token is in the answer."""
    repetition, frequency, presence = strength_E3.unbind(1)
    repeated = torch.where(logit_E > 0, logit_E / repetition, logit_E * repetition)
    return repeated - frequency * count_E - presence * (count_E > 0)


def _strength(sampling: Sampling) -> tuple[float, float, float]:
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty


def _by_identity(fixed: dict[int, FixedEdits]) -> list[tuple[FixedEdits, list[int]]]:
    """Group rows by identity of their edits."""
    rows: dict[int, list[int]] = {}
    for row, edits in fixed.items():
        rows.setdefault(id(edits), []).append(row)
    return [(fixed[shared_rows[0]], shared_rows) for shared_rows in rows.values()]


def _masks(contexts: Sequence[NodeContext | None], fixed: dict[int, FixedEdits], vocab_size: int) -> dict[int, Bools]:
    """Return [V] the allowed tokens by row, for rows that do not allow all."""
    following = _followed(contexts)
    masks = {}
    for row, edits in fixed.items():
        context = contexts[row]
        assert context is not None
        allowed = _allowed(context, edits, vocab_size, following.get(row))
        if allowed is not None:
            masks[row] = allowed
    return masks


def _followed(contexts: Sequence[NodeContext | None]) -> dict[int, Bools | None]:
    """Return the grammars' masks by row; all are asked once, before any is awaited."""
    rows: dict[int, list[int]] = {}
    for row, context in enumerate(contexts):
        if context is not None and context.text.grammar is not None:
            rows.setdefault(id(context.text.grammar), []).append(row)
    asked = []
    for shared_rows in rows.values():
        own = [context for row in shared_rows if (context := contexts[row]) is not None]
        text, grammar = own[0].text, own[0].text.grammar
        assert grammar is not None
        paths = [context.path for context in own]
        asked.append((shared_rows, grammar.masks(text.tokens[text.num_prompt :], paths)))
    return {row: mask for shared_rows, wait in asked for row, mask in zip(shared_rows, wait(), strict=True)}


def _allowed(context: NodeContext, fixed: FixedEdits, vocab_size: int, following: Bools | None) -> Bools | None:
    """Return [V] the tokens that may come next, None for all.

    An end token that the grammar demands may come before min_tokens. following: the grammar's mask.
    """
    text = context.text
    holds_back = context.num_emitted < text.min_tokens
    allowed = fixed.allowed(vocab_size, holds_back, text.tokens, context.path)
    if following is None:
        return allowed
    both = following if allowed is None else allowed & following
    if holds_back and not both.any():
        allowed = fixed.allowed(vocab_size, False, text.tokens, context.path)
        both = following if allowed is None else allowed & following
    return both
