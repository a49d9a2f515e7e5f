"""Memories of whole texts, in which a head's layers can be trained.

Nothing is overwritten, and gradients pass.
Rows of R texts of L tokens lie one after the other, [R * L]. (`engine.heads.layers.Memory`.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_Kept = tuple[Tensor, Tensor]


class ChainMemory:
    """The memory of EAGLE-3's training-time test.

    Step k (from 0) computes the rows at drafting depth k + 1 after every token at once. The row of
    token i sees the rows of step 0, which have read the target's states, up to token i - k, and of
    each later step m the one row of its chain, at token i - k + m.
    """

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts
        self._steps: dict[int, list[_Kept]] = {}
        """[R, H_kv, L, D] K and V of each step, by layer."""

    def store(self, layer: int, key_THD: Tensor, value_THD: Tensor) -> None:
        """Add a step."""
        kept = (_by_text(key_THD, self._num_texts), _by_text(value_THD, self._num_texts))
        self._steps.setdefault(layer, []).append(kept)

    def attend(
        self, module: Any, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """[T, H, D] attention of a step."""
        assert window is None
        self.store(module.layer_idx, key_THD, value_THD)
        steps = self._steps[module.layer_idx]
        step = len(steps) - 1
        query = _by_text(query_THD, self._num_texts)
        groups = query.shape[1] // steps[0][0].shape[1]
        keys = [_moved(key.repeat_interleave(groups, 1), step - number) for number, (key, _) in enumerate(steps)]
        values = [_moved(value.repeat_interleave(groups, 1), step - number) for number, (_, value) in enumerate(steps)]
        # Row i of a moved step is the one that token i sees. Token 0 has no row: the target has no
        # state before it.
        length = query.shape[2]
        index = torch.arange(length, device=query.device)
        seen_LL = (index[None] <= index[:, None] - step) & (index[None] > 0)
        text_scores = query @ steps[0][0].repeat_interleave(groups, 1).transpose(-1, -2) * scaling
        # Rows before the first that a chain of this depth has see themselves, and count nowhere.
        text_scores = text_scores.masked_fill(~seen_LL, -torch.inf)
        own_scores = [(query * key).sum(-1, keepdim=True) * scaling for key in keys[1:]]
        if not step:
            text_scores = text_scores.masked_fill((index == 0)[:, None] & (index == 0)[None], 0)
        weights = torch.cat([text_scores, *own_scores], -1).float().softmax(-1).to(query.dtype)
        output = weights[..., :length] @ steps[0][1].repeat_interleave(groups, 1)
        for number, value in enumerate(values[1:]):
            output = output + weights[..., length + number, None] * value
        return _flat(output)


def _by_text(part_THD: Tensor, num_texts: int) -> Tensor:
    """Return [R, H, L, D]."""
    return part_THD.reshape(num_texts, -1, *part_THD.shape[1:]).transpose(1, 2)


def _flat(part: Tensor) -> Tensor:
    """Return [R * L, H, D]."""
    return part.transpose(1, 2).flatten(0, 1)


def _moved(part: Tensor, distance: int) -> Tensor:
    """[R, H, L, D] with what lay `distance` places before."""
    return part.roll(distance, 2) if distance else part
