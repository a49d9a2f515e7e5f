"""Budgets of a run: texts and epochs that fit a time."""

from __future__ import annotations

import pytest

from research.distill.budget import Amount, Present, Speeds, estimate, fitting

SPEEDS = Speeds(sampling=300, states=600, training=900, report_s=40, checkpoint_s=5)


@pytest.mark.parametrize("present", [Present(), Present(given=10**6), Present(sampled=200_000, states=100_000)])
@pytest.mark.parametrize("hours", [0.3, 2.0])
def test_an_amount_that_fits_a_time_takes_that_time(present: Present, hours: float) -> None:
    amount = fitting(3600 * hours, SPEEDS, present, 10)
    assert estimate(amount, SPEEDS, present, 10).total_s == pytest.approx(3600 * hours, rel=0.01)


def test_an_estimate_counts_only_what_is_missing() -> None:
    amount = Amount(600_000, 2)
    estimated = estimate(amount, SPEEDS, Present(given=400_000, sampled=100_000, states=150_000), 10)
    # Half of the texts are given ones, of which there are enough.
    assert estimated.sampling_s == pytest.approx((600_000 - 300_000 - 100_000) / 300)
    assert estimated.states_s == pytest.approx(450_000 / 600)
    assert estimated.training_s == pytest.approx(1_200_000 / 900 + 50)


def test_texts_that_cost_much_are_trained_on_more_often() -> None:
    cheap = Speeds(sampling=9000, states=9000, training=900, report_s=40, checkpoint_s=5)
    assert fitting(3600, cheap, Present(), 10).epochs < fitting(3600, SPEEDS, Present(), 10).epochs


def test_too_little_time_is_no_text() -> None:
    assert fitting(10, SPEEDS, Present(), 10).num_tokens == 0
