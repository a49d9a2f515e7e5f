"""The random numbers of a step in one Numba kernel; `noise.uniform` specifies them."""

# Numba sees a kernel's arguments only when it is run.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-unimported, no-untyped-call"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.cpu.compiled.floats import EXACT
from engine.cpu.compiler import compiled_for_cpu
from engine.noise import GOLDEN, LARGEST, MIX_1, MIX_2

Ints = npt.NDArray[np.int64]
_ONE = np.uint64(1)


@compiled_for_cpu(**EXACT)
def _mixed(word):
    word = (word ^ (word >> np.uint64(30))) * MIX_1
    word = (word ^ (word >> np.uint64(27))) * MIX_2
    return word ^ (word >> np.uint64(31))


@compiled_for_cpu(**EXACT)
def _with(word, part):
    return _mixed(word ^ ((np.uint64(part) + _ONE) * GOLDEN))


@compiled_for_cpu(**EXACT)
def _fill(seeds, positions, purposes, ranks, numbers):
    for chain in range(len(seeds)):
        position_word = _with(_mixed(np.uint64(seeds[chain]) + GOLDEN), positions[chain])
        for purpose in range(len(purposes)):
            chain_word = _with(_with(position_word, purposes[purpose]), ranks[chain])
            for depth in range(numbers.shape[2]):
                word = _with(chain_word, depth)
                number = (np.float64(word >> np.uint64(11)) + 0.5) * 2.0**-53
                numbers[purpose, chain, depth] = min(number, LARGEST)


def uniform(seed_C: Ints, position_C: Ints, purpose_P: Ints, rank_C: Ints, length: int) -> npt.NDArray[np.float64]:
    """Return [P, C, L] the numbers of these purposes, by chain and depth."""
    numbers = np.empty((len(purpose_P), len(seed_C), length))
    _fill(seed_C, position_C, purpose_P, rank_C, numbers)
    return numbers
