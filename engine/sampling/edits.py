"""Changes of a request's logits that depend on its text: bias, penalties, masks. Before temperature and filters.

A *context* is a place that needs a distribution: after a text, and after a path of drafted tokens below it. Every node
of every branch has a context, and counts are those of its own path. Order, as in vLLM: logit_bias; repetition penalty
(tokens of prompt and answer: a positive logit is divided, a negative one multiplied); frequency and presence penalties
(tokens of the answer); then masks: allowed tokens, bad words, the grammar (a budget of thoughts is one, too), no end
token before min_tokens (unless the grammar demands one). If the masks leave no token, all tokens are equally likely,
and a request that reaches such a context is ended (`has_dead_end`).

Penalties count drafted tokens on their device, so that they never wait for it; bad words and grammars need the tokens
on the host.

Not for: temperature, top-k, top-p, min-p (`distribution.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import NOTHING_LEFT, RequestError
from engine.fixed_edits import FixedEdits
from engine.kernels.transfer import to_device
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
    """Number of drafted tokens after the text."""
    path: tuple[int, ...] = ()
    """These tokens, if masks depend on them (`plan.Row.needs_path`)."""

    @property
    def num_emitted(self) -> int:
        """Return the number of tokens of the answer before this context."""
        return len(self.text.tokens) - self.text.num_prompt + self.depth


def edit(logits_NV: Tensor, contexts: Sequence[NodeContext | None], path_ND: Tensor | None = None) -> Tensor:
    """Return the edited logits; rows whose context is None are unchanged.

    path_ND: the drafted tokens above each node, which penalties count, on the logits' device; entries beyond a node's
    depth are ignored. None if no node has any.
    """
    if not any(contexts):
        return logits_NV
    device, vocab_size = logits_NV.device, logits_NV.shape[1]
    edited_NV = logits_NV.float().clone()
    fixed = {row: context.text.fixed for row, context in enumerate(contexts) if context}
    for edits, rows in _by_identity(fixed):
        if len(edits.bias_tokens):
            index = (to_device(np.array(rows), device).unsqueeze(1), to_device(edits.bias_tokens, device))
            edited_NV.index_put_(index, to_device(edits.bias_values, device), accumulate=True)
    penalised = [(row, context) for row, context in enumerate(contexts) if context and context.sampling.has_penalties]
    if penalised:
        _penalise(edited_NV, penalised, path_ND)
    # A sum beyond float32 would give non-finite probabilities.
    edited_NV.clamp_(max=_LARGEST)
    masks = _masks(contexts, fixed, vocab_size)
    if masks:
        masked = to_device(np.array(list(masks)), device)
        # Most nodes of a request share one mask.
        different = {id(mask): mask for mask in masks.values()}
        number_of = {name: number for number, name in enumerate(different)}
        number_M = to_device(np.array([number_of[id(mask)] for mask in masks.values()]), device)
        allowed_MV = to_device(np.stack(list(different.values())), device)[number_M]
        masked_MV = edited_NV[masked].masked_fill_(~allowed_MV, -torch.inf)
        is_dead_M1 = (masked_MV.amax(1) == -torch.inf).unsqueeze(1)
        edited_NV[masked] = masked_MV.masked_fill_(is_dead_M1, 0.0)
    return edited_NV


def has_dead_end(text: LogitContext, emitted: Sequence[int], vocab_size: int) -> bool:
    """Whether one of the tokens emitted after a text was drawn where the request's masks leave no token.

    Dead ends of the grammar itself are detected by the grammar (`engine.grammar`).
    """
    num_held = 0 if text.grammar else text.min_tokens - (len(text.tokens) - text.num_prompt)
    return text.fixed.has_dead_end(text.tokens, emitted, num_held, vocab_size)


def _penalise(edited_NV: Tensor, penalised: Sequence[tuple[int, NodeContext]], path_ND: Tensor | None) -> None:
    """Apply penalties in place to the rows `penalised`.

    A token is penalised for all its occurrences in the text and in the path above its node.
    """
    device = edited_NV.device
    texts = list({id(context.text): context.text for _, context in penalised}.values())
    number_of = {id(text): number for number, text in enumerate(texts)}
    row_P = np.array([row for row, _ in penalised])
    text_P = np.array([number_of[id(context.text)] for _, context in penalised])
    strength_P3 = to_device(np.array([_strength(context.sampling) for _, context in penalised], np.float32), device)

    counts = [text.counts.of(text.tokens) for text in texts]
    place_E = np.repeat(np.arange(len(penalised)), [len(counts[text][0]) for text in text_P])
    token_E, count_E = (np.concatenate([counts[text][part] for text in text_P]) for part in (0, 1))
    of_text = (to_device(row_P[place_E], device), to_device(token_E, device))
    strength_E3 = strength_P3[to_device(place_E, device)]
    changed_E = _changed(edited_NV[of_text], strength_E3, to_device(count_E, device))

    depth_P = np.array([context.depth for _, context in penalised])
    if path_ND is None or not depth_P.any():
        edited_NV[of_text] = changed_E
        return
    # One entry for every token of every path; equal ones of a path get the same value.
    place_X = np.repeat(np.arange(len(penalised)), depth_P)
    at_X = np.arange(len(place_X)) - (np.cumsum(depth_P) - depth_P)[place_X]
    row_X = to_device(row_P[place_X], device)
    token_X = path_ND[row_X, to_device(at_X, device)]
    is_above_XD = to_device(np.arange(path_ND.shape[1]) < depth_P[place_X, None], device)
    times_X = ((path_ND[row_X] == token_X.unsqueeze(1)) & is_above_XD).sum(1)
    times_X = times_X + _table(counts, edited_NV.shape[1], device)[to_device(text_P[place_X], device), token_X]
    strength_X3 = strength_P3[to_device(place_X, device)]
    changed_X = _changed(edited_NV[row_X, token_X], strength_X3, times_X)
    edited_NV[of_text] = changed_E
    edited_NV[row_X, token_X] = changed_X


def _changed(logit_E: Tensor, strength_E3: Tensor, count_E: Tensor) -> Tensor:
    """Return [E] logits with their penalties; count_E: how often each token is in the answer."""
    repetition, frequency, presence = strength_E3.unbind(1)
    repeated = torch.where(logit_E > 0, logit_E / repetition, logit_E * repetition)
    return repeated - frequency * count_E - presence * (count_E > 0)


def _table(counts: Sequence[tuple[Ints, Numbers]], vocab_size: int, device: torch.device) -> Tensor:
    """Return [texts, V] how often each token is in each answer."""
    text_E = np.repeat(np.arange(len(counts)), [len(tokens) for tokens, _ in counts])
    token_E, times_E = (np.concatenate([one[part] for one in counts]) for part in (0, 1))
    table = torch.zeros((len(counts), vocab_size), device=device)
    table[to_device(text_E, device), to_device(token_E, device)] = to_device(times_E, device)
    return table


def _strength(sampling: Sampling) -> tuple[float, float, float]:
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty


def _by_identity(fixed: dict[int, FixedEdits]) -> list[tuple[FixedEdits, list[int]]]:
    """Group rows by identity of their edits."""
    rows: dict[int, list[int]] = {}
    for row, edits in fixed.items():
        rows.setdefault(id(edits), []).append(row)
    return [(fixed[of_one[0]], of_one) for of_one in rows.values()]


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
    """Return the grammars' masks by row. Each grammar is asked once for all its rows, and all are asked before any
    is awaited.
    """
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


def _allowed(context: NodeContext, fixed: FixedEdits, vocab_size: int, following: Bools | None) -> Bools | None:
    """Return [V] the tokens that may come next, None for all. An end token that the grammar demands may come before
    min_tokens.

    following: mask of the context's grammar.
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
