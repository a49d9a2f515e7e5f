"""Seed-stable sampling: distribution, seed and index decide a token.

Every token x has an exponential clock E_x named by (seed, index of the token drawn, x). The drawn
token is the one with the largest p(x) / E_x, which has probability p(x). So the same seed gives the
same answer with and without speculation, for any drafts. The draft model races the same clocks over
its own distribution q: if q is near p, the same token wins (one draft wins with probability at
least (1 - d) / (1 + d), with total variation d: Daliri, Musco and Suresh, 2025), and further drafts
are the next in the race. The price is acceptance: a rule that uses p and q together accepts more.

Not for: the distributions (`distribution.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.transfer import to_device_at_once
from engine.noise import GOLDEN, LARGEST, MIX_1, MIX_2, Purpose, hash_words
from engine.request import Sampling


def race(probs_NV: Tensor, samplings: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """Return [N, V] (float64) scores of the race; 0 for tokens of probability zero.

    indices: index in its text of each row's token.
    """
    names = [(sampling.seed, index) for sampling, index in zip(samplings, indices, strict=True)]
    # Nodes of one depth share their clocks.
    different = list(dict.fromkeys(names))
    seeds, places = zip(*different, strict=True)
    number_of = {name: number for number, name in enumerate(different)}
    number_N = np.array([number_of[name] for name in names])
    begun_M = hash_words(seeds, places, int(Purpose.CLOCK), 0).view(np.int64)
    begun, number = to_device_at_once([begun_M, number_N], probs_NV.device)
    return probs_NV.double() / -uniform_rows(begun, probs_NV.shape[1]).log()[number]


def winners_only(race_NV: Tensor) -> Tensor:
    """Return [N, V] (float32) probability 1 for the winner of each race."""
    return torch.zeros_like(race_NV, dtype=torch.float32).scatter_(1, race_NV.argmax(1, keepdim=True), 1.0)


def uniform_rows(begun_N: Tensor, count: int) -> Tensor:
    """Return [N, count] `uniform(seed, position, purpose, 0, 0 .. count - 1)` on the device.

    begun_N: `hash_words` of seed, position, purpose and 0.
    """
    part_K = (torch.arange(count, device=begun_N.device) + 1) * int(GOLDEN.view(np.int64))
    word = begun_N.unsqueeze(1) ^ part_K
    # The same finaliser in signed 64-bit words: products wrap, and masks make shifts logical.
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        word = (word ^ _shifted(word, shift)) * int(factor.view(np.int64))
    word = word ^ _shifted(word, 31)
    return ((_shifted(word, 11).double() + 0.5) * 2.0**-53).clamp_(max=LARGEST)


def _shifted(word: torch.Tensor, count: int) -> torch.Tensor:
    return (word >> count) & ((1 << (64 - count)) - 1)
