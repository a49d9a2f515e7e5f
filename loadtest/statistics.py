"""Intervals of ratios from paired measurements, by scipy's bootstrap, which resamples the pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_RESAMPLES = 4000

Numbers = Sequence[float] | npt.NDArray[Any]


class Ratio(NamedTuple):
    """Ratio with its 95 % interval."""

    ratio: float
    low: float
    high: float


def ratio_of_sums(numerators: Numbers, denominators: Numbers) -> Ratio:
    """Return sum(numerators) / sum(denominators)."""
    return interval(lambda above, below, axis: above.sum(axis) / below.sum(axis), numerators, denominators)


def median_of_ratios(numerators: Numbers, denominators: Numbers) -> Ratio:
    """Return the median of the pairs' ratios."""
    return interval(lambda above, below, axis: np.median(above / below, axis), numerators, denominators)


def interval(statistic: Callable[..., Any], *samples: Numbers) -> Ratio:
    """Return a statistic of paired samples with its 95 % interval.

    `statistic` takes the samples and their axis.
    """
    from scipy.stats import bootstrap  # slow to import

    arrays = tuple(np.asarray(sample, dtype=float) for sample in samples)
    value = float(statistic(*arrays, -1))
    if len(arrays[0]) < 2:
        return Ratio(value, value, value)
    found = bootstrap(
        arrays,
        lambda *drawn, axis: statistic(*drawn, axis),
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return Ratio(value, float(low), float(high))
