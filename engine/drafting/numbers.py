"""Random numbers of a step, generated in one call for all its chains.

Not for: the numbers themselves (`engine.noise`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.kernels.protocol import ChainNoise
from engine.kernels.torch_kernels import Kernels
from engine.noise import Purpose

Ints = npt.NDArray[np.int64]

_DEEP = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.CHOSEN_ACCEPT)
"""Purposes that need a number for each chain and depth."""
_ONCE = (Purpose.RESIDUAL, Purpose.SCORE, Purpose.CHOSEN_RESIDUAL)
"""Purposes that need a number for each chain."""
_PURPOSES = np.array([*_DEEP, *_ONCE])
SCORE_PART = len(_DEEP) + _ONCE.index(Purpose.SCORE)
"""Index, on the first axis of `draw_numbers`, of the numbers for the race of scores."""


def draw_numbers(
    kernels: Kernels, seed_C: Ints, position_C: Ints, rank_C: Ints, length: int
) -> npt.NDArray[np.float64]:
    """Return [6, C, L] the random numbers of a step, by purpose, for `noise_of`.

    position_C: the first index that each chain drafts, which names its numbers.
    """
    numbers = kernels.uniform(seed_C, position_C, _PURPOSES, rank_C, max(1, length))
    numbers[0] = numbers[0].T.reshape(numbers[0].shape)  # drafting takes them level by level
    return numbers


def noise_of(numbers: Tensor, length: int) -> tuple[Tensor, ChainNoise]:
    """Return ([L, C] the numbers for drafting, the numbers for the rules).

    Both are views of the result of `draw_numbers`.
    """
    _, accept, chosen_accept, residual, score, chosen_residual = numbers
    noise = ChainNoise(
        accept[:, :length],
        residual[:, 0],
        score[:, 0],
        chosen_accept[:, :length],
        chosen_residual[:, 0],
    )
    return drafting_numbers(numbers, length), noise


def drafting_numbers(numbers: Tensor, length: int) -> Tensor:
    """Return [L, C] the numbers of `draw_numbers` for drafting."""
    return numbers[0].view(-1, numbers.shape[1])[:length]
