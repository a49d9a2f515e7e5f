"""Estimates of acceptance and of answers' lengths, against the same formulas by hand."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from engine.control.acceptance import SUREST, Acceptance, with_chains


def observed(*seen: tuple[int, int, int], longest: int = 3) -> Acceptance:
    """Statistics after one step with these (chains, tried positions, accepted positions)."""
    acceptance = Acceptance(longest)
    for observation in seen:
        acceptance.observe(*observation)
    acceptance.apply(1)
    return acceptance


def test_more_chains_accept_more() -> None:
    assert with_chains(0.5, 1) == 0.5
    assert with_chains(0.5, 16) == 0.75
    prior = Acceptance(3)
    assert prior.by_position(1) == pytest.approx([0.7] * 3)
    assert prior.by_position(16) == pytest.approx([1 - 0.3**2] * 3)
    assert prior.log_std(16) == pytest.approx(0.15)
    assert prior.reached(1) == pytest.approx([0.7, 0.49, 0.343])


def test_estimates_move_from_the_prior_to_what_was_seen() -> None:
    """Three steps of 16 chains, in which each position is accepted less often.

    3 of 3 first positions, 1 of 3 second ones, 0 of 2 third ones.
    """
    acceptance = Acceptance(3)
    for observation in ((16, 3, 1), (16, 3, 1), (16, 2, 2)):
        acceptance.observe(*observation)
        assert acceptance.by_position(16) == pytest.approx([0.91] * 3), "until `apply` nothing changes"
    acceptance.apply(1)
    # 8 observations with mean 1/2 and 6 of the prior; 16 chains accept as one does twice.
    single = (6 * 0.7 + 8 * (1 - 0.5**0.5)) / 14
    first = (3 + 6 * (1 - (1 - single) ** 2)) / 9
    second = (1 + 6 * first) / 9
    third = 6 * second / 8
    assert acceptance.by_position(16) == pytest.approx([first, second, third])
    assert acceptance.by_position(1) == pytest.approx([single] * 3)
    assert acceptance.reached(16) == pytest.approx(np.cumprod([first, second, third]))
    assert acceptance.log_std(16) == pytest.approx(0.15 * math.sqrt(6 / 14))
    assert acceptance.log_std(1) == pytest.approx(0.15 * single / 0.7), "drafts that fail vary little"


def test_older_observations_count_less() -> None:
    acceptance = observed((1, 1, 1))
    acceptance.observe(1, 2, 0)
    acceptance.apply(500)
    old = 0.998**500
    assert 0.3 < old < 0.4
    mean = old / (old + 2)
    single = (4.2 + (old + 2) * mean) / (6 + old + 2)
    first = (old + 6 * single) / (old + 1 + 6)
    assert acceptance.by_position(1) == pytest.approx([first, 6 * first / 7, 6 * first / 7])
    acceptance.apply(10**4)
    assert acceptance.by_position(1) == pytest.approx([0.7] * 3)
    # One observation that has almost faded still counts by its weight.
    faded = observed((1, 1, 0))
    faded.apply(500)
    assert faded.by_position(16)[0] == pytest.approx(1 - (1 - 4.2 / (6 + old)) ** 2)


def test_no_estimate_reaches_one() -> None:
    sure = observed(*[(16, 3, 3)] * 10_000)
    assert sure.by_position(16).tolist() == [SUREST] * 3
    # One of 16 chains fails as often as the square root of what all fail.
    single = (4.2 + 30_000 * (1 - (1 - SUREST) ** 0.5)) / 30_006
    assert sure.by_position(1) == pytest.approx([single] * 3)
    assert observed(*[(1, 3, 3)] * 10_000).by_position(256).tolist() == [SUREST] * 3
    assert observed((1, 0, 0)).by_position(1) == pytest.approx([0.7] * 3), "no position was tried"


def test_acceptance_is_learned_by_position_and_spreads_to_other_numbers_of_chains() -> None:
    acceptance = Acceptance(8)
    before = acceptance.by_position(4)[0]
    for _ in range(300):
        acceptance.observe(1, 2, 1)
        acceptance.apply(1)
    eight = copy.deepcopy(acceptance)
    eight.apply(8)
    for _ in range(8):
        acceptance.apply(1)
    assert eight.by_position(1) == pytest.approx(acceptance.by_position(1))
    assert acceptance.by_position(1)[0] > 0.9
    assert acceptance.by_position(1)[1] < 0.2
    assert acceptance.by_position(4)[0] < before, "half of one chain's tokens fail"


def test_prompts_are_as_long_as_recent_ones() -> None:
    acceptance = Acceptance(3)
    assert acceptance.prompt_share == 0
    acceptance.note_answer(10, 20)
    acceptance.note_answer(30, 40)
    tokens = 0.95 * (0.95 * 128 + 20) + 40
    assert acceptance.prompt_share == pytest.approx((0.95 * 10 + 30) / tokens)
    for _ in range(20_000):
        acceptance.note_answer(10, 0)
    assert acceptance.prompt_share == pytest.approx(200), "as if the answers had one token together"
