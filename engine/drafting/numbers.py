"""Random numbers of a step, generated in one call for all its chains.

Not for: the numbers themselves (`engine.sampling.noise`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels import usable
from engine.kernels.protocol import ChainNoise
from engine.sampling.noise import Purpose, uniform

Ints = npt.NDArray[np.int64]

_DEEP = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.CHOSEN_ACCEPT)
"""Purposes that need a number for each chain and depth."""
_ONCE = (Purpose.RESIDUAL, Purpose.SCORE, Purpose.CHOSEN_RESIDUAL)
"""Purposes that need a number for each chain."""
_PURPOSES = np.array([*_DEEP, *_ONCE])
SCORE_PART = len(_DEEP) + _ONCE.index(Purpose.SCORE)
"""Index, on the first axis of `draw_numbers`, of the numbers for the race of scores."""


def draw_numbers(seed_C: Ints, position_C: Ints, rank_C: Ints, length: int) -> npt.NDArray[np.float64]:
    """Return [6, C, L] the random numbers of a step, by purpose, for `noise_of`.

    position_C: the first index that each chain drafts, which names its numbers.
    """
    if usable("random numbers are drawn", fault_in_numbers, torch.device("cpu"), compiler="Numba"):
        from engine.sampling import numba_noise  # Numba is installed if its kernels are used

        numbers = numba_noise.uniform(seed_C, position_C, _PURPOSES, rank_C, max(1, length))
    else:
        numbers = _uniform(seed_C, position_C, rank_C, max(1, length))
    numbers[0] = numbers[0].T.reshape(numbers[0].shape)  # drafting takes them level by level
    return numbers


def _uniform(seed_C: Ints, position_C: Ints, rank_C: Ints, length: int) -> npt.NDArray[np.float64]:
    """Return [6, C, L] by plain operations."""
    depths, purposes = np.arange(length), _PURPOSES[:, None, None]
    return uniform(seed_C[:, None], position_C[:, None], purposes, rank_C[:, None], depths)


def fault_in_numbers(_device: torch.device) -> str | None:
    """Return the fault of the kernel of random numbers; None if it agrees with the plain operations."""
    from engine.sampling import numba_noise

    seed_C, position_C, rank_C = np.array([[-(2**63), -1, 2**63 - 1, 7], [0, 3, 2**40, 1], [0, 1, 2, 3]])
    found = numba_noise.uniform(seed_C, position_C, _PURPOSES, rank_C, 5)
    return None if np.array_equal(found, _uniform(seed_C, position_C, rank_C, 5)) else "numbers differ"


def noise_of(numbers: Tensor, length: int) -> tuple[Tensor, ChainNoise]:
    """Return ([L, C] the numbers for drafting, the numbers for the rules): views of `draw_numbers`."""
    _, accept, chosen_accept, residual, score, chosen_residual = numbers
    noise = ChainNoise(
        accept[:, :length], residual[:, 0], score[:, 0], chosen_accept[:, :length], chosen_residual[:, 0]
    )
    return drafting_numbers(numbers, length), noise


def drafting_numbers(numbers: Tensor, length: int) -> Tensor:
    """Return [L, C] the numbers of `draw_numbers` for drafting."""
    return numbers[0].view(-1, numbers.shape[1])[:length]
