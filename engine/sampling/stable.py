"""Seed-stable sampling: a token is a function of the law, the seed and its place in the text, and of nothing else.

Every token x has an exponential clock E_x named by (seed, index of the token drawn, x); the token is the one with the
largest p(x) / E_x, which has probability p(x). So the same seed gives the same answer with speculation off or on,
whatever is drafted. The draft model races the same clocks over its own law: where q is near p the same token wins
(with one draft at least with probability (1 - d) / (1 + d), d the total variation: Daliri, Musco and Suresh, 2025),
and further drafts are the next in the race. The price is acceptance: a rule that looks at p and q together keeps more.

Not for: the laws (`law.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.transfer import to_device
from engine.request import Sampling
from engine.sampling.noise import GOLDEN, LARGEST, MIX_1, MIX_2, Purpose, hash_words


def race(law_NV: Tensor, samplings: Sequence[Sampling], indices: Sequence[int]) -> Tensor:
    """[N, V] (float64) how early each token finishes, the first largest; tokens of probability zero have 0.

    indices: place in its text of the token that each law is for.
    """
    names = [(sampling.seed, index) for sampling, index in zip(samplings, indices, strict=True)]
    # Nodes of one depth share their clocks.
    different = list(dict.fromkeys(names))
    seeds, places = zip(*different, strict=True)
    clock_MV = -uniform_rows(seeds, places, Purpose.CLOCK, law_NV.shape[1], law_NV.device).log()
    number_of = {name: number for number, name in enumerate(different)}
    return law_NV.double() / clock_MV[to_device(np.array([number_of[name] for name in names]), law_NV.device)]


def winners_only(race_NV: Tensor) -> Tensor:
    """[N, V] (float32) all mass on the winner of each race."""
    return torch.zeros_like(race_NV, dtype=torch.float32).scatter_(1, race_NV.argmax(1, keepdim=True), 1.0)


def uniform_rows(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, count: int, device: torch.device
) -> torch.Tensor:
    """[N, count] `uniform(seed, position, purpose, 0, 0 .. count - 1)` in rows, computed on the device."""
    begun_N1 = to_device(hash_words(seeds, positions, int(purpose), 0).view(np.int64), device).unsqueeze(1)
    part_K = (torch.arange(count, device=device) + 1) * int(GOLDEN.view(np.int64))
    word = begun_N1 ^ part_K
    # The finaliser once more, in signed 64-bit words: products wrap, shifts are made logical by masks.
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        word = (word ^ _shifted(word, shift)) * int(factor.view(np.int64))
    word = word ^ _shifted(word, 31)
    return ((_shifted(word, 11).double() + 0.5) * 2.0**-53).clamp_(max=LARGEST)


def _shifted(word: torch.Tensor, count: int) -> torch.Tensor:
    return (word >> count) & ((1 << (64 - count)) - 1)
