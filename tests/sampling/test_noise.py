"""Noise is uniform, depends on every part of its name, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest

from engine.noise import GOLDEN, MIX_1, MIX_2, Purpose, choice_seed, hash_words, uniform
from engine.request import Sampling
from engine.sampling.stable import race, uniform_rows

COUNT = 40_000


def test_is_uniform_along_every_part_of_the_name() -> None:
    line = np.arange(COUNT)
    series = {
        "seed": uniform(line, 7, Purpose.DRAFT),
        "position": uniform(7, line, Purpose.DRAFT),
        "chain": uniform(7, 7, Purpose.DRAFT, line),
        "depth": uniform(7, 7, Purpose.DRAFT, 0, line),
    }
    for name, values in series.items():
        assert values.min() > 0
        assert values.max() < 1
        assert kstest(values, "uniform").pvalue > 1e-4, name


def test_neighbouring_names_are_independent() -> None:
    """Pairs of numbers whose names differ in one part fill the unit square evenly."""
    line = np.arange(COUNT)
    first = uniform(line, 3, Purpose.DRAFT, 1, 1)
    others = {
        "seed": uniform(line + 1, 3, Purpose.DRAFT, 1, 1),
        "position": uniform(line, 4, Purpose.DRAFT, 1, 1),
        "purpose": uniform(line, 3, Purpose.ACCEPT, 1, 1),
        "chain": uniform(line, 3, Purpose.DRAFT, 2, 1),
        "depth": uniform(line, 3, Purpose.DRAFT, 1, 2),
    }
    for name, second in others.items():
        counts = np.histogram2d(first, second, bins=10, range=[[0, 1], [0, 1]])[0]
        statistic = ((counts - COUNT / 100) ** 2 / (COUNT / 100)).sum()
        assert chi2.sf(statistic, 99) > 1e-4, name


def test_swapped_parts_give_other_numbers() -> None:
    assert uniform(1, 2, Purpose.DRAFT, 3, 4)[0] != uniform(1, 2, Purpose.DRAFT, 4, 3)[0]
    assert uniform(1, 2, Purpose.DRAFT)[0] != uniform(2, 1, Purpose.DRAFT)[0]


def test_is_a_function_of_its_name_and_broadcasts() -> None:
    grid = uniform(np.array([[1], [-5]]), np.arange(4), Purpose.SCORE)
    assert grid.shape == (2, 4)
    assert grid[1, 2] == uniform(-5, 2, Purpose.SCORE)[0]


def test_kernel_returns_the_same_numbers() -> None:
    pytest.importorskip("numba")
    from engine.cpu.compiled import random_numbers

    chance = np.random.default_rng(0)
    seed_C, position_C, rank_C = chance.integers(-(2**63), 2**63 - 1, (3, 200))
    purposes = np.array(list(Purpose))
    plain = uniform(seed_C[:, None], position_C[:, None], purposes[:, None, None], rank_C[:, None], np.arange(9))
    assert np.array_equal(random_numbers.uniform(seed_C, position_C, purposes, rank_C, 9), plain)


def by_hand(*name: int) -> int:
    """SplitMix64's finaliser over the parts of a name, in integers without a size."""
    word = 0
    for number, part in enumerate(name):
        part %= 1 << 64
        word = _finalised(part + 0x9E3779B97F4A7C15 if number == 0 else word ^ ((part + 1) * 0x9E3779B97F4A7C15))
    return word


def _finalised(word: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word %= 1 << 64
        word = (word ^ (word >> shift)) * factor
    word %= 1 << 64
    return word ^ (word >> 31)


def test_numbers_are_the_same_in_every_version() -> None:
    """A change of these numbers is a change of a promise."""
    for seed, position, purpose, chain, depth in ((0, 0, Purpose.DRAFT, 0, 0), (-7, 2**40, Purpose.CLOCK, 3, 50_000)):
        word = by_hand(seed, position, purpose, chain, depth)
        assert uniform(seed, position, purpose, chain, depth)[0] == ((word >> 11) + 0.5) / 2**53
    assert uniform(1, 2, Purpose.ACCEPT)[0] == ((by_hand(1, 2, Purpose.ACCEPT, 0, 0) >> 11) + 0.5) / 2**53
    assert uniform(1, 2, Purpose.ACCEPT, 3, 4)[0] == 0.2722337081597647
    for seed, index in ((42, 1), (-(2**63), 7)):
        word = by_hand(seed, index, Purpose.CHOICE)
        assert choice_seed(seed, index) == word - (word >> 63 << 64)
    assert choice_seed(1, 2) == 8242326735480361726


def test_choices_have_seeds_of_their_own_and_the_first_keeps_the_request_s() -> None:
    seeds = [choice_seed(42, index) for index in range(100)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def unmixed(word: int) -> int:
    """The word that splitmix64's finaliser makes this one of."""
    for shift, factor in ((31, int(MIX_2)), (27, int(MIX_1)), (30, 1)):
        mixed = word
        for _ in range(64 // shift):
            mixed = word ^ (mixed >> shift)
        word = mixed * pow(factor, -1, 1 << 64) % (1 << 64)
    return word


def seed_of(word: int, *parts: int) -> int:
    """The seed with which a name of these parts hashes to a word."""
    for part in reversed(parts):
        word = unmixed(word) ^ (part + 1) * int(GOLDEN) % (1 << 64)
    seed = (unmixed(word) - int(GOLDEN)) % (1 << 64)
    return seed - (1 << 64) if seed >= 1 << 63 else seed


@pytest.mark.parametrize("word", [0, (1 << 64) - 1])
def test_the_smallest_and_the_largest_number_are_inside(word: int) -> None:
    """Float64 rounds the largest to 1, whose logarithm is 0."""
    seed = seed_of(word, 7, Purpose.CLOCK, 0, 3)
    assert int(hash_words(seed, 7, Purpose.CLOCK, 0, 3)[0]) == word
    (number,) = uniform(seed, 7, Purpose.CLOCK, 0, 3)
    assert 0 < number < 1
    probs_NV = torch.tensor([[0.0, 0.0, 0.5, 0.0 if word else 0.5, 0.5]])
    begun = torch.from_numpy(hash_words([seed], [7], int(Purpose.CLOCK), 0).view(np.int64))
    assert uniform_rows(begun, 5)[0, 3] == number
    race_NV = race(probs_NV, [Sampling(seed=seed)], [7])
    assert race_NV.isfinite().all()
    assert probs_NV[0, race_NV.argmax()] > 0
