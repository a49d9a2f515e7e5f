"""All random numbers that draft, verify and sample tokens, as a function of their use.

A number is named by (request seed, position, purpose, chain, depth) and hashed from that name.
There is no generator and no state, so an answer does not depend on other requests, and a preempted
request draws the same numbers again.

`position` is the index of the first token that a step drafts. Each step emits at least one token,
so no two steps of a request share a position and **no number is used twice**, even if a rejected
token's index is drafted again. (Its old number has already influenced where the last step stopped;
using it again would bias the output.) The clocks of seed-stable rows are named by the token's own
index instead, because draft and target must race the same (`stable.py`).

Not for: anything that should look random to an adversary. The hash is the 64-bit finaliser of
splitmix64 (Steele, Lea and Flood, 2014), applied once per part of the name.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)

LARGEST = 1 - 2.0**-53
"""Largest number below 1; the sum of the largest word and a half would be rounded to 1."""


class Purpose(IntEnum):
    """Decision that a random number is for. Rules see five purposes as a `ChainNoise`."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    SCORE = 4
    CHOICE = 5
    """Seed of one of several choices (`choice_seed`)."""
    CHOSEN_ACCEPT = 6
    CHOSEN_RESIDUAL = 7
    OBSERVE = 8
    """Steps and rows whose gap to the optimum is reported."""
    TEXT_DRAFT = 9
    CLOCK = 10


def _mix(word: Words) -> Words:
    word = (word ^ (word >> np.uint64(30))) * MIX_1
    word = (word ^ (word >> np.uint64(27))) * MIX_2
    return word ^ (word >> np.uint64(31))


def _words(values: npt.ArrayLike) -> Words:
    return np.atleast_1d(np.asarray(values)).astype(np.int64).view(np.uint64)


def hash_words(seed: npt.ArrayLike, *parts: npt.ArrayLike) -> Words:
    """Hash the parts of a name to a word; they broadcast."""
    with np.errstate(over="ignore"):
        word = _mix(_words(seed) + GOLDEN)
        for part in parts:
            word = _mix(word ^ (_words(part) + np.uint64(1)) * GOLDEN)
        return word


def uniform(
    seed: npt.ArrayLike,
    position: npt.ArrayLike,
    purpose: npt.ArrayLike,
    chain: npt.ArrayLike = 0,
    depth: npt.ArrayLike = 0,
) -> npt.NDArray[np.float64]:
    """Return uniform numbers strictly inside (0, 1); arguments broadcast (one dimension or more).

    purpose: one `Purpose`, or several, to draw for them in one call.
    """
    word = hash_words(seed, position, purpose, chain, depth)
    return np.minimum(((word >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, LARGEST)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th of several choices; choice 0 has the request's."""
    if index == 0:
        return seed
    return int(hash_words(seed, index, int(Purpose.CHOICE)).view(np.int64)[0])
