"""Random numbers of a step, generated in one call for all its chains.

The array is [6, C, L] by purpose, chain and depth, but [L, C] for drafting, which takes them level
by level. Not for: the numbers themselves (`engine.noise`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.kernels.torch_kernels import Kernels
from engine.noise import Purpose

Ints = npt.NDArray[np.int64]

_DEEP = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.CHOSEN_ACCEPT)
_ONCE = (Purpose.RESIDUAL, Purpose.SCORE, Purpose.CHOSEN_RESIDUAL)
"""Purposes with one number for each chain, that of depth 0; one call makes all depths."""
_PURPOSES = np.array([*_DEEP, *_ONCE])
SCORE_PART = len(_DEEP) + _ONCE.index(Purpose.SCORE)
"""Index of the race's scores on the first axis of `draw_numbers`."""


def draw_numbers(
    kernels: Kernels, seed_C: Ints, position_C: Ints, rank_C: Ints, length: int
) -> npt.NDArray[np.float64]:
    """Return [6, C, L] the random numbers of a step, for `drafting_numbers` and `ChainNoise.of`.

    position_C: the first index that each chain drafts, which names its numbers.
    """
    numbers = kernels.uniform(seed_C, position_C, _PURPOSES, rank_C, max(1, length))
    _store_by_level(numbers[0])
    return numbers


def _store_by_level(numbers_CL: npt.NDArray[np.float64]) -> None:
    """Store numbers in the order [L, C], in place."""
    numbers_CL[:] = numbers_CL.T.reshape(numbers_CL.shape)


def drafting_numbers(numbers: Tensor, length: int) -> Tensor:
    """Return [L, C] the numbers of `draw_numbers` for drafting, as a view."""
    num_chains = numbers.shape[1]
    return numbers[0].view(-1, num_chains)[:length]
